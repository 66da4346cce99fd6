# SPDX-License-Identifier: Apache-2.0
"""The one entry point: ``python -m benchmarks <subcommand>``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# One compiler process, which is gone when timing begins. Must be set before torch._inductor loads.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# OpenBLAS threads spin for 2**28 cycles after a call, 0.1 s in which they take a core from whoever
# is timed next. 2**22 cycles are as long as OpenMP's. Must be set before numpy and scipy load.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "22")
# Some machines are set up to have OpenBLAS use the kernels of an older processor, at half the speed
# of those that a user would get. Peers are compared with at their best.
os.environ.pop("OPENBLAS_CORETYPE", None)
os.environ.pop("OPENBLAS_L2_SIZE", None)

import torch
from rich.console import Console

from benchmarks import (
    accuracy,
    ops,
    options,
    peers,
    pictures,
    report,
    scaling,
    sharded,
    simulation,
    steps,
)
from benchmarks.harness import Row

RESULTS = Path(__file__).parent / "results"

SUBCOMMANDS = {
    "ops": "gram, weighted sum, MimiC, memory update against libraries, eager torch, torch.compile",
    "steps": "whole server steps against eager torch, Flower and ByzFL",
    "scaling": "time over S, d, K and threads",
    "main": "ops and steps and the roofline picture, into a folder (what `make bench` runs)",
    "sharded": "weak scaling in d, with columns spread over processes",
    "accuracy": "errors against float64 up to d = 1e8, with a picture",
    "simulation": "local training against a plain PyTorch loop, rounds against Flower's simulation",
    "pictures": "draw the pictures of a folder again, from its CSV files",
}
_TITLES = {"ops": "Ops", "steps": "Server steps", "scaling": "Scaling"}
_CASES = {"ops": ops.cases, "steps": steps.cases, "scaling": scaling.cases}


def parser() -> argparse.ArgumentParser:
    """All subcommands and options."""
    top = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Speed and accuracy of fastagg. How it measures: docs/benchmarks.md.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="subcommand")
    for name, text in SUBCOMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name in (*_CASES, "main"):
            options.add(sub)
        elif name == "sharded":
            sharded.add(sub)
        elif name == "accuracy":
            sub.add_argument("--threads", type=int, default=torch.get_num_threads())
            sub.add_argument("--quick", action="store_true", help="dry run: d = 1e3 and 1e4")
            sub.add_argument("--max-d", type=int, default=10**8, help="1e8 needs 8 GB of memory")
            options.add_outputs(sub)
        elif name == "simulation":
            simulation.add_options(sub)
        else:
            sub.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    namespace = parser().parse_args(arguments)
    console = report.make_console()
    if namespace.command == "pictures":
        _draw(namespace.out, console)
    elif namespace.command == "sharded":
        sharded.run(namespace, console)
    elif namespace.command == "accuracy":
        _accuracy(namespace, console)
    elif namespace.command == "simulation":
        simulation.run(namespace, console)
    elif namespace.command == "main":
        namespace.out = namespace.out or RESULTS
        rows = [row for name in ("ops", "steps") for row in _time(name, namespace, console)]
        if namespace.csv:
            report.write_csv(namespace.csv, rows)
        _draw(namespace.out, console)
    else:
        rows = _time(namespace.command, namespace, console)
        if namespace.csv:
            report.write_csv(namespace.csv, rows)


def _time(name: str, namespace: argparse.Namespace, console: Console) -> list[Row]:
    chosen = options.parse(namespace)
    if name == "steps":
        peers.announce(console)
    rows = options.run(_CASES[name](chosen), chosen, console)
    if not rows:
        raise SystemExit(f"--only: no comparison of {name} has {chosen.only!r} in its name")
    title = f"{_TITLES[name]}: {chosen.threads} threads, medians of {chosen.repeats}"
    report.show(rows, title, console)
    report.show_headline(rows, console)
    report.show_targets(rows, console)
    if namespace.out:
        report.write_csv(namespace.out / f"{name}.csv", rows)
        command = f"python -m benchmarks {name}"
        report.write_markdown(namespace.out / f"{name}.md", rows, _TITLES[name], command)
        console.print(f"written: {name}.csv and {name}.md in {namespace.out}")
    return rows


def _accuracy(namespace: argparse.Namespace, console: Console) -> None:
    errors = accuracy.run(namespace, console)
    accuracy.show(errors, console)
    if namespace.csv:
        accuracy.write_csv(namespace.csv, errors)
    if namespace.out:
        accuracy.write_csv(namespace.out / "accuracy.csv", errors)
        accuracy.write_markdown(namespace.out / "accuracy.md", errors)
        _draw(namespace.out, console)


def _draw(folder: Path, console: Console) -> None:
    """Every picture whose table is in the folder."""
    for table, picture, draw in (
        ("ops.csv", "roofline.png", pictures.roofline),
        ("accuracy.csv", "accuracy.png", pictures.accuracy),
    ):
        if (folder / table).exists():
            console.print(f"drawn: {draw(folder / table, folder / picture)}")


if __name__ == "__main__":
    main(sys.argv[1:])
