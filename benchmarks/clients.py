# SPDX-License-Identifier: Apache-2.0
"""Rounds of the simulation with 100 active clients among 10^3, 10^4 and 10^5.

A round should cost what its active clients cost. Each case is a process of its own, so that its
peak of memory is known, with one thread. Clients have 40 generated samples each (Synthetic(1,1) in
50 hidden groups), or share those of Fashion-MNIST (`label-limited` with `shared`).

``python -m benchmarks.clients DATASET RULE K ROUNDS`` runs one case, and prints the seconds of
every round and bytes as JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import report
from benchmarks.machine import ROOT, Watch, describe
from fastagg_sim import data
from fastagg_sim.config import Dropout, Job, LocalTraining, Method, Task
from fastagg_sim.devices import peak_memory
from fastagg_sim.simulation import Simulation

SIZES = (1_000, 10_000, 100_000)  # K
ACTIVE = 100  # S
RULES: dict[str, dict[str, str]] = {
    "fedavg": {},
    "fdms-means": {},
    "mifa": {"memory_dtype": "bfloat16"},
}
CASES = [*(("synthetic", rule) for rule in RULES), ("fmnist", "fedavg")]
WARM_UP = 2  # rounds


@dataclass(frozen=True)
class Timed:
    """One case.

    seconds: the median of a round, metrics included; q1, q3: the quartiles.
    growth: `seconds` divided by that with the fewest clients.
    peak_mb, before_mb: resident memory, the largest and before the data are loaded, in 10^6 bytes.
    verdict: "busy" if other processes used the machine, else "ok".
    """

    dataset: str
    rule: str
    K: int
    S: int
    seconds: float
    q1: float
    q3: float
    growth: float
    peak_mb: float
    before_mb: float
    verdict: str


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds; default: 30")
    parser.add_argument("--quick", action="store_true", help="dry run with up to 1,000 clients")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write clients.*")


def run(options: argparse.Namespace, console: Console) -> list[Timed]:
    """Measure all cases and print the table."""
    sizes = (200, 1_000) if options.quick else SIZES
    results: list[Timed] = []
    for dataset, rule in CASES:
        images = data.DATASETS[dataset].images
        if images is not None and not data.cache_path(images).exists():
            console.print(f"{dataset}: skipped (get it with: fastagg-sim data {dataset})")
            continue
        base: float | None = None
        for K in sizes:
            console.print(f"{dataset}, {rule}, K = {K:,}", style="dim")
            results.append(measure(dataset, rule, K, options.rounds, base))
            base = base or results[-1].seconds
    text = markdown(results)
    console.print(text, markup=False)
    if options.out:
        said = (
            f"Medians of {options.rounds} rounds, of which none evaluates the model. One thread. "
            f"{ACTIVE} active clients, `sampled`, 5 local steps (`fmnist`: 1)."
        )
        page = report.write_page(options.out, "clients", "Rounds of many clients", said, text)
        with page.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
            table, machine = csv.writer(file, lineterminator="\n"), describe()
            table.writerow([*(field.name for field in fields(Timed)), *machine])
            for result in results:
                cells = (f"{v:.5g}" if isinstance(v, float) else v for v in astuple(result))
                table.writerow([*cells, *machine.values()])
    return results


def measure(dataset: str, rule: str, K: int, rounds: int, base: float | None) -> Timed:
    """Run a case in a new process. base: the seconds of a round with the fewest clients."""
    command = [sys.executable, "-m", "benchmarks.clients", dataset, rule, str(K), str(rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{dataset}, {rule}, K = {K:,} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    q1, median, q3 = statistics.quantiles(found["seconds"], n=4, method="inclusive")
    return Timed(
        dataset,
        rule,
        K,
        ACTIVE,
        median,
        q1,
        q3,
        median / (base or median),
        found["peak"] / 1e6,
        found["before"] / 1e6,
        "busy" if found["busy"] else "ok",
    )


def job(dataset: str, rule: str, K: int, rounds: int) -> Job:
    steps = 5 if dataset == "synthetic" else 1
    at_once = 128 if dataset == "synthetic" else 20
    given: dict[str, object] = {
        "partition": "natural",
        "model": "logistic",
        "data_options": {"num_clients": K, "groups": 50, "samples": 40},
    }
    if dataset != "synthetic":
        options = {"shared": True, "shard_size": 20}
        given = {"partition": "label-limited", "model": "niid-cnn", "partition_options": options}
    task = Task(
        dataset=dataset,
        training=LocalTraining(batch_size=10, local_steps=steps, lr=0.05, clients_at_once=at_once),
        rounds=rounds + 1,
        num_clients=K,
        eval_every=rounds + 1,
        **given,  # type: ignore[arg-type]  # three fields of different types
    )
    return Job(task, Method(rule, rule, RULES[rule]), Dropout("sampled", {"sample": ACTIVE}), 0)


def main(dataset: str, rule: str, K: int, rounds: int) -> None:
    """Run one case in this process, and print its numbers as JSON."""
    torch.set_num_threads(1)
    before = peak_memory()
    simulation = Simulation(job(dataset, rule, K, WARM_UP + rounds))
    for _ in range(WARM_UP):
        simulation.run_round()
    seconds = []
    with Watch() as watch:
        for _ in range(rounds):
            start = time.perf_counter()
            simulation.run_round()
            seconds.append(time.perf_counter() - start)
    memory = {"before": before, "peak": peak_memory()}
    print(json.dumps({"seconds": seconds, "busy": watch.busy, **memory}))


def markdown(results: Sequence[Timed]) -> str:
    lines = [
        "| data | rule | K | S | ms per round | rounds a second | x fewest clients | peak MB | of "
        "which PyTorch and modules |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        mark = "" if r.verdict == "ok" else f" ({r.verdict})"
        lines.append(
            f"| {r.dataset} | `{r.rule}` | {r.K:,} | {r.S} | {1e3 * r.seconds:.1f}{mark} | "
            f"{1 / r.seconds:.1f} | {r.growth:.2f} | {r.peak_mb:.0f} | {r.before_mb:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
