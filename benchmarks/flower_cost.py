# SPDX-License-Identifier: Apache-2.0
"""What a Flower server spends on the aggregation of a round: processor time, time and memory.

The same replies are aggregated by Flower's strategies and by fastagg's, in turn and in one process.
A reply holds the client's weights as bytes, as Flower delivers them. Memory is the growth of the
resident memory during a round, beside the replies; what a strategy keeps from round to round is
counted separately.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks import peers, report

SIZES = ((200, 1_000_000), (50, 10_000_000))  # (S, d)
PEERS = ("FedAvg", "FedMedian", "MultiKrum")
RULES = ("fedavg", "fedavg, no max_norm", "mifa", "mimic", "fdms", "multi-krum")
LAYERS = 10  # arrays of a model

Aggregate = Callable[[list[Any]], object]
"""Aggregates replies."""


@dataclass(frozen=True)
class Cost:
    """What a round took: medians.

    Attributes:
        way: the strategy.
        cpu, seconds: processor time of all threads, and time, in seconds.
        megabytes: growth of the resident memory during the round, at most.
        kept: megabytes that the strategy keeps after the round.
    """

    way: str
    cpu: float
    seconds: float
    megabytes: float
    kept: float


def replies(count: int, num_params: int) -> tuple[Any, list[Any]]:
    """Return the model as a record, and ``count`` replies with weights near it."""
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

    rng = np.random.default_rng(0)
    size = num_params // LAYERS
    model = [rng.standard_normal(size, dtype=np.float32) for _ in range(LAYERS)]
    record = ArrayRecord({f"layer{i}": Array(layer) for i, layer in enumerate(model)})
    found = []
    for client in range(count):
        step = np.float32(0.01) * rng.standard_normal(size, dtype=np.float32)
        arrays = ArrayRecord({f"layer{i}": Array(layer + step) for i, layer in enumerate(model)})
        metrics = MetricRecord({"num-examples": 10, "partition-id": client})
        found.append(_reply(client + 1, RecordDict({"arrays": arrays, "metrics": metrics})))
    return record, found


def _reply(node: int, content: Any) -> Any:
    return SimpleNamespace(
        content=content,
        metadata=SimpleNamespace(src_node_id=node, reply_to_message_id=str(node)),
        has_error=lambda: False,
        has_content=lambda: True,
    )


def fresh(messages: Sequence[Any]) -> list[Any]:
    """Return replies with the same bytes in other records; Flower's strategies empty records."""
    from flwr.app import ArrayRecord, RecordDict

    found = []
    for message in messages:
        arrays = ArrayRecord(dict(message.content["arrays"]))
        content = RecordDict({"arrays": arrays, "metrics": message.content["metrics"]})
        found.append(_reply(message.metadata.src_node_id, content))
    return found


def ways(record: Any, messages: list[Any], chosen: Sequence[str]) -> dict[str, Aggregate]:
    """Return a function for each strategy that aggregates one round."""
    from flwr.serverapp import strategy as flower

    from fastagg.integrations.flower import FastAggStrategy

    made: dict[str, Aggregate] = {}
    count = len(messages)
    nodes = [str(message.metadata.src_node_id) for message in messages]
    model = {name: array.data for name, array in record.items()}
    for name in PEERS:
        if name not in chosen:
            continue
        peer = getattr(flower, name)(**({"num_malicious_nodes": 1} if "Krum" in name else {}))
        made[f"Flower's {name}"] = functools.partial(peer.aggregate_train, 1)
    for name in RULES:
        if name not in chosen:
            continue
        rule, _, without = name.partition(",")
        options: dict[str, Any] = {"max_norm": None} if without else {}
        ours = FastAggStrategy(rule, num_clients=count, **options)

        def aggregate(replies: list[Any], ours: FastAggStrategy = ours) -> None:
            ours.server.open_round(nodes, nodes)
            result, _ = ours.aggregate_train(1, replies)
            assert result is not None and ours.last_report is not None
            assert len(ours.last_report.active) == count, ours.last_report.lines()

        ours.server.set_model(model)
        made[f"fastagg: {name}"] = aggregate
    return made


def resident(field: str) -> float:
    """Return a field of the process's status, such as VmRSS, in megabytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1e3
    raise ValueError(f"no {field} in the status of the process")


def measure(
    made: dict[str, Aggregate], messages: Sequence[Any], repeats: int, console: Console
) -> list[Cost]:
    """Run every way ``repeats`` times, in turn, after two rounds that allocate what is kept."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in made}
    kept: dict[str, float] = {}
    for repeat in range(-2, repeats):
        for name, aggregate in made.items():
            given = fresh(messages)
            gc.collect()
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            cpu, begin = time.process_time(), time.perf_counter()
            aggregate(given)
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            peak = resident("VmHWM") - before
            gc.collect()
            if repeat < 0:
                kept[name] = kept.get(name, 0.0) + resident("VmRSS") - before
            else:
                found[name].append((cpu, seconds, peak))
            console.print(f"  {name}: {cpu:.2f} s of processor, {seconds:.2f} s", style="dim")
    costs = []
    for name, rows in found.items():
        cpu, seconds, peak = (statistics.median(column) for column in zip(*rows, strict=True))
        costs.append(Cost(name, cpu, seconds, peak, kept[name]))
    return costs


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="rounds; default: 5")
    parser.add_argument(
        "--sizes", nargs="+", metavar="SxD", default=[f"{s}x{d}" for s, d in SIZES],
        help="replies and parameters; default: %(default)s, which need 10 GB of memory",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[*PEERS, *RULES], default=[*PEERS, *RULES],
        help="some strategies; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write flower.md")


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure all sizes and print a table for each."""
    if not peers.installed("flwr"):
        raise SystemExit("flower: Flower is not installed (make bench-peers installs it)")
    threads, parts = torch.get_num_threads(), []
    for size in options.sizes:
        count, num_params = (int(float(number)) for number in size.split("x"))
        record, messages = replies(count, num_params)
        made = ways(record, messages, options.only)
        logging.getLogger("flwr").setLevel(logging.ERROR)
        costs = measure(made, messages, max(1, options.repeats), console)
        first = costs[0]
        headings = ["strategy", "CPU s", "of the first", "s", "of the first", "MB", "kept MB"]
        lines = [
            [
                cost.way,
                f"{cost.cpu:.2f}",
                f"{cost.cpu / first.cpu:.2f}",
                f"{cost.seconds:.2f}",
                f"{cost.seconds / first.seconds:.2f}",
                f"{cost.megabytes:.0f}",
                f"{cost.kept:.0f}",
            ]
            for cost in costs
        ]
        table = report.markdown(headings, lines)
        parts.append(f"## {count} replies of {num_params:,} parameters\n\n{table}")
        console.print(parts[-1], markup=False)
        del made, messages, record
    if options.out:
        said = (
            f"Aggregation of one round with {threads} threads, medians of {options.repeats}. MB: "
            "growth of the resident memory during the round, beside the replies; kept MB: what "
            "remains after the first two rounds."
        )
        title = "Aggregation in a Flower server"
        path = report.write_page(options.out, "flower", title, said, "\n\n".join(parts))
        console.print(f"written: {path}")
