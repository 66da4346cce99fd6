# SPDX-License-Identifier: Apache-2.0
"""Speed of the simulation: local training against a plain PyTorch loop, rounds against Flower.

Local training runs on one thread; all implementations train on the same batches, in turn. Rounds of
whole simulations use all cores: fastagg's simulation runs one job per core, as `fastagg-sim` does
for methods and seeds, and Flower's runs one job with one Ray actor per core.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import spread
from benchmarks.machine import ROOT, Watch, describe
from benchmarks.peers import installed
from benchmarks.simulation_profile import profile_ways
from fastagg import FlatLayout, UpdateBuffer
from fastagg_sim import data
from fastagg_sim.batched_clients import (
    BatchedTrainer,
    ClientWork,
    clients_at_once,
    uses_products,
)
from fastagg_sim.client import ClientData, LocalTrainer, batches
from fastagg_sim.config import Config, Dropout, LocalTraining, Method, Task, to_json
from fastagg_sim.models import make_model
from fastagg_sim.pooling import MaxPool2x2
from fastagg_sim.progress import Progress
from fastagg_sim.results import ResultsFolder
from fastagg_sim.runner import default_workers, run_jobs
from fastagg_sim.seeds import generator
from fastagg_sim.simulation import groups_of

NOISY = 0.25
CONVOLUTIONS = ("mnist-cnn", "lenet", "niid-cnn")  # models that have them
BARE = "plain loop"


@dataclass(frozen=True)
class Case:
    """A model on a data set with a batch size."""

    dataset: str
    model: str
    batch_size: int

    @property
    def clients(self) -> int:
        return 128 if self.model in ("logistic", "digits-mlp") else max(10, 200 // self.batch_size)

    @property
    def steps(self) -> int:
        """Number of local steps of every client."""
        return max(2, 40 // self.batch_size)

    @property
    def title(self) -> str:
        return f"{self.model} {self.dataset} batch {self.batch_size}"


CASES = [
    *(Case("mnist", "mnist-cnn", size) for size in (5, 10, 20, 50)),
    *(Case("cifar10", "lenet", size) for size in (10, 20, 50, 200)),
    Case("fmnist", "niid-cnn", 32),
    *(Case("digits", "digits-mlp", size) for size in (10, 50)),
    *(Case("synthetic", "logistic", size) for size in (10, 50)),
    Case("mnist", "logistic", 50),
]


@dataclass(frozen=True)
class Line:
    """A line of the table.

    seconds: the median time of a local step, or of a round.
    times_baseline: the time of the baseline divided by `seconds`; NaN if `verdict` is not "ok" for
        both.
    verdict: "ok", "noisy" (the times vary too much) or "busy" (other processes used the machine).
    """

    what: str
    way: str
    clients_at_once: int
    seconds: float
    seconds_q1: float
    seconds_q3: float
    repeats: int
    times_baseline: float
    verdict: str  # "ok", "noisy" or "busy"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each implementation")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of the whole simulations")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run only cases whose name contains TEXT"
    )
    parser.add_argument("--quick", action="store_true", help="dry run on the data set digits")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print where the time of a local step goes, instead of measuring",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write simulation.csv and simulation.md to this folder; existing lines of other cases "
        "are kept",
    )


def run(options: argparse.Namespace, console: Console) -> list[Line]:
    """Measure the cases that the options select, and print the table."""
    console.print("   ".join(f"{key} {value}" for key, value in describe().items()))
    cases = [c for c in CASES if not options.quick or c.dataset == "digits"]
    lines: list[Line] = []
    for case in cases:
        if options.only not in case.title:
            continue
        try:
            if options.profile:
                profile(case, console)
            else:
                lines += local_training(case, 3 if options.quick else options.repeats)
        except data.DataNotFoundError:
            console.print(
                f"{case.title}: skipped, no data set {case.dataset} "
                f"(get it with: fastagg-sim data {case.dataset})"
            )
    if options.profile:
        return lines
    if options.only in "rounds":
        rounds = 5 if options.quick else options.rounds
        lines += whole_rounds("digits" if options.quick else "mnist", rounds, console)
    if not lines:
        raise SystemExit(f"--only: no case has a name that contains {options.only!r}")
    console.print(table(lines))
    if options.out:
        write(options.out, lines)
        console.print(f"written: simulation.csv and simulation.md in {options.out}")
    return lines


# --- local training ----------------------------------------------------------------------------


def local_training(case: Case, repeats: int) -> list[Line]:
    """Measure, on one thread, the plain loop, one client after the other, and clients at once."""
    ways = training_ways(case)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in ways}
    try:
        for call in ways.values():
            call()
        with Watch() as watch:
            for _ in range(repeats):
                for key, call in ways.items():
                    start = time.perf_counter()
                    call()
                    taken = time.perf_counter() - start
                    seconds[key].append(taken / (case.clients * case.steps))
    finally:
        torch.set_num_threads(before)
    lines = [_line(case.title, *key, values, watch.busy) for key, values in seconds.items()]
    return _with_ratios(lines, BARE)


def profile(case: Case, console: Console) -> None:
    """Print the profile of every way to train, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        profile_ways(case.title, training_ways(case), case.clients * case.steps, console)
    finally:
        torch.set_num_threads(before)


def with_torch_pooling(model: nn.Module) -> nn.Module:
    """Return a copy of `model` with PyTorch's pooling instead of fastagg_sim's, which is faster."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, MaxPool2x2):
                setattr(module, name, nn.MaxPool2d(2))
    return model


def training_ways(case: Case) -> dict[tuple[str, int], Callable[[], list[Tensor]]]:
    """Return the implementations by (name, clients at once).

    Each returns the updates of all clients.
    """
    dataset = data.load(case.dataset, seed=0)
    model = make_model(
        case.model, num_classes=dataset.num_classes, in_shape=dataset.in_shape, seed=0
    )
    layout = FlatLayout.from_module(model)
    start = layout.flatten(model)
    training = LocalTraining(batch_size=case.batch_size, local_steps=case.steps, lr=0.05)
    order = torch.randperm(len(dataset.train_y), generator=generator(0, "bench"))
    size = case.batch_size * case.steps
    clients = []
    for k in range(case.clients):
        ids = order[(torch.arange(size) + k * size) % len(order)]
        clients.append(ClientData(dataset.train_x[ids], dataset.train_y[ids]))
    buffer = UpdateBuffer(case.clients, layout.num_params)

    def plain(order: torch.memory_format = torch.contiguous_format) -> list[Tensor]:
        local = with_torch_pooling(model).to(memory_format=order)  # type: ignore[call-overload]
        updates = []
        for k, client in enumerate(clients):
            local.load_state_dict(model.state_dict())
            optimizer = torch.optim.SGD(local.parameters(), lr=training.rate(0))
            for x, y in batches(client, training, generator(0, "batches", 0, k)):
                optimizer.zero_grad()
                if order is not torch.contiguous_format:
                    x = x.contiguous(memory_format=order)
                functional.cross_entropy(local(x), y).backward()
                optimizer.step()
            updates.append(layout.flatten(local) - start)
        return updates

    trainer = LocalTrainer(copy.deepcopy(model), layout, training)

    def recorded() -> list[Tensor]:
        for k, client in enumerate(clients):
            order = generator(0, "batches", 0, k)
            trainer.train(buffer.row(k), start, client, 0, order)
        return buffer.rows(range(case.clients))

    batched = BatchedTrainer(model, layout, training)

    def together(count: int) -> list[Tensor]:
        for ids in groups_of(range(case.clients), count):
            work = [
                ClientWork(buffer.row(k), clients[k], generator(0, "batches", 0, k)) for k in ids
            ]
            batched.train(work, start, 0)
        return buffer.rows(range(case.clients))

    # The same choice as in `fastagg_sim.simulation.Simulation`.
    one_by_one = (lambda: together(1)) if uses_products(model) else recorded
    ways: dict[tuple[str, int], Callable[[], list[Tensor]]] = {(BARE, 1): plain}
    if case.model in CONVOLUTIONS:
        ways[f"{BARE}, channels last", 1] = lambda: plain(torch.channels_last)
    ways["one by one", 1] = one_by_one
    chosen = clients_at_once(case.model, dataset.in_shape, case.batch_size)
    if chosen > 1:
        ways["at once", min(chosen, case.clients)] = lambda: together(chosen)
    return ways


# --- whole rounds ------------------------------------------------------------------------------


def whole_rounds(dataset: str, rounds: int, console: Console) -> list[Line]:
    """Measure the seconds per round of fastagg's and Flower's simulation.

    For jobs that run in parallel, the seconds of a round are divided by the number of jobs.
    """
    workers = default_workers()
    config = _config(dataset, rounds, workers)
    training = config.task.training
    faster = replace(
        training,
        clients_at_once=clients_at_once(
            config.task.model, data.DATASETS[dataset].in_shape, training.batch_size
        ),
    )
    lines = [
        _ours(config, workers),
        _ours(replace(config, task=replace(config.task, training=faster)), workers),
    ]
    if not (installed("flwr") and installed("ray")):
        console.print(
            "flwr with ray is not installed: skipped (make bench-peers installs it)", style="dim"
        )
        return lines
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(to_json(config.jobs()[0]))
        active = config.task.num_clients // 2
        command = [sys.executable, "-m", "benchmarks.flower_run", str(job), str(active)]
        result = subprocess.run(
            [*command, str(workers)], cwd=ROOT, capture_output=True, text=True, check=False
        )
    if result.returncode:
        raise SystemExit(f"Flower's simulation failed:\n{result.stderr[-3000:]}")
    seconds = json.loads(result.stdout.strip().splitlines()[-1])
    flower = _line("rounds", f"Flower, 1 job, {workers} Ray actors", 1, seconds, busy=False)
    return _with_ratios([flower, *lines], flower.way)


def _config(dataset: str, rounds: int, jobs: int) -> Config:
    """Return the setting of FL-FDMS, figure 1 (MNIST), half of the clients active, in `jobs` jobs,
    one per seed."""
    digits = dataset == "digits"
    task = Task(
        dataset=dataset,
        partition="clustered",
        model="digits-mlp" if digits else "mnist-cnn",
        training=LocalTraining(batch_size=5, local_epochs=2, lr=0.1),
        rounds=rounds,
        partition_options={"num_groups": 5, "samples_per_client": 60 if digits else 200},
        train_fraction=0.8,
        data_options={} if digits else {"normalize": "unit"},
    )
    half = Dropout("exact", {"alpha": 0.5})
    return Config("speed", task, (Method("fedavg", "fedavg"),), (half,), tuple(range(jobs)))


def _ours(config: Config, workers: int) -> Line:
    with tempfile.TemporaryDirectory() as path, open(os.devnull, "w") as nowhere:
        folder = ResultsFolder(Path(path), config)
        folder.prepare()
        outcome = run_jobs(
            folder.job_folders(),
            workers=workers,
            progress=Progress(config.jobs(), Console(file=nowhere)),
        )
        if outcome.failures:
            raise SystemExit("\n".join(outcome.failures.values()))
        folder.merge()
        with open(folder.path / "timings.csv", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    # Skip the first round, which warms up, as for Flower.
    seconds = [
        sum(float(v) for name, v in row.items() if name.startswith("seconds_")) / workers
        for row in rows
        if int(row["round"]) > 0
    ]
    count = config.task.training.clients_at_once
    return _line("rounds", f"fastagg-sim, {workers} jobs", count, seconds, busy=False)


# --- tables ------------------------------------------------------------------------------------


def _line(what: str, way: str, count: int, seconds: Sequence[float], busy: bool) -> Line:
    q1, median, q3 = statistics.quantiles(seconds, n=4, method="inclusive")
    verdict = "busy" if busy else "noisy" if spread(seconds) > NOISY else "ok"
    return Line(what, way, count, median, q1, q3, len(seconds), math.nan, verdict)


def _with_ratios(lines: Sequence[Line], baseline: str) -> list[Line]:
    (base,) = (line for line in lines if line.way == baseline)
    return [
        replace(line, times_baseline=base.seconds / line.seconds)
        if line.verdict == base.verdict == "ok"
        else line
        for line in lines
    ]


def _cells(lines: Sequence[Line]) -> Iterator[tuple[str, ...]]:
    for line in lines:
        refused = "-" if line.verdict == "ok" else line.verdict
        ratio = refused if math.isnan(line.times_baseline) else f"{line.times_baseline:.2f}"
        count = str(line.clients_at_once)
        yield line.what, line.way, count, f"{1e3 * line.seconds:,.3f}", ratio


COLUMNS = [field.name for field in fields(Line)]
HEADINGS = ("what", "way", "clients at once", "ms", "x plain loop, x Flower")


def table(lines: Sequence[Line]) -> Table:
    shown = Table(title="Simulation: ms per local step on one core, ms per round on all")
    for heading in HEADINGS:
        shown.add_column(heading)
    for cells in _cells(lines):
        shown.add_row(*cells)
    return shown


def _typed(field: Field[Any], row: Mapping[str, Any]) -> Any:
    convert = {"int": int, "float": float, "str": str}[str(field.type)]
    return convert(row[field.name])


def write(folder: Path, lines: Sequence[Line]) -> None:
    """Write simulation.csv and simulation.md; existing lines of other cases are kept."""
    about = describe()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "simulation.csv"
    new = [{**asdict(line), **about} for line in lines]
    measured = {line.what for line in lines}
    rows: list[dict[str, Any]] = [*new]
    if path.exists():
        with open(path, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["what"] not in measured] + rows
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *about], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
    every = [Line(**{field.name: _typed(field, row) for field in fields(Line)}) for row in rows]
    body = [HEADINGS, ("---",) * len(HEADINGS), *_cells(every)]
    text = [
        "# Simulation",
        "",
        "Written by `python -m benchmarks simulation`. " + ", ".join(map(" ".join, about.items())),
        "",
        "Milliseconds (medians) of a local step of one client on one core, against a plain PyTorch",
        "loop, and of a round with all cores in use, against Flower's simulation.",
        "",
        *("| " + " | ".join(cells) + " |" for cells in body),
    ]
    (folder / "simulation.md").write_text("\n".join(text) + "\n", encoding="utf-8")
