# SPDX-License-Identifier: Apache-2.0
"""The entry point: ``python -m benchmarks <subcommand>``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

# Use one compiler process, which has ended when timing begins. Must be set before torch._inductor
# is imported.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# By default OpenBLAS threads spin for 2**28 cycles (0.1 s) after a call and occupy cores that the
# next contender needs. OpenMP's threads spin for about 2**22 cycles, so use the same. Must be set
# before numpy and scipy are imported.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "22")
# On some machines these variables make OpenBLAS use the kernels of an older processor, at half the
# speed that a user would get. Other libraries are measured at their best.
os.environ.pop("OPENBLAS_CORETYPE", None)
os.environ.pop("OPENBLAS_L2_SIZE", None)

import torch
from rich.console import Console

from benchmarks import (
    abi,
    accuracy,
    attacks,
    busy,
    by_kind,
    clients,
    columns,
    flower_cost,
    friends,
    highway,
    ops,
    options,
    pauses,
    peers,
    pictures,
    regress,
    report,
    scaling,
    sharded,
    simulation,
    small,
    spinning,
    steps,
)
from benchmarks.ceilings import kind
from benchmarks.harness import Row

RESULTS = Path(__file__).parent / "results"
STOPPED = 130  # the exit status of a process that Ctrl-C ended

SUBCOMMANDS = {
    "ops": "compare single ops with libraries, eager torch and torch.compile",
    "steps": "compare whole server steps with eager torch, Flower and ByzFL",
    "columns": "compare medians and other statistics of columns with torch, numpy and ByzFL",
    "scaling": "measure time as a function of S, d, K and the number of threads",
    "main": "run ops and steps, and draw the roofline picture (this is what `make bench` runs)",
    "sharded": "measure weak scaling in d, with columns distributed over processes",
    "busy": "time steps on small models, idle and with a busy process on each core",
    "pauses": "time calls after pauses, in which all threads sleep",
    "spinning": "time steps right after an operation of PyTorch, whose threads spin for a while",
    "small": "time steps on small models with one thread: ops, Python, and eager code",
    "abi": "time an op through interfaces that would serve every version of PyTorch",
    "highway": "compare two kernels with the same ones written with Google Highway",
    "flower": "measure what servers with Flower's strategies and with fastagg's spend on a round",
    "friends": "find friends of up to 10^6 clients, beside FAISS, and time whole steps",
    "regress": "compare the speed of this tree with that of an earlier commit",
    "accuracy": "measure errors relative to float64 up to d = 1e8, and draw them",
    "attacks": "let clients lie under every rule, and measure what defences change",
    "clients": "time rounds of the simulation with 10^3 to 10^5 clients",
    "simulation": "compare local training with a plain PyTorch loop, and rounds with Flower's",
    "targets": "list all targets on every kind of processor that has results; measures nothing",
    "pictures": "redraw the pictures of a results folder from its CSV files",
}
# Modules with add_options(parser) and run(namespace, console), by subcommand.
_MODULES = {
    "abi": abi,
    "attacks": attacks,
    "busy": busy,
    "clients": clients,
    "flower": flower_cost,
    "friends": friends,
    "highway": highway,
    "pauses": pauses,
    "regress": regress,
    "sharded": sharded,
    "simulation": simulation,
    "small": small,
    "spinning": spinning,
    "targets": by_kind,
}
_LEAST = {"clients": 2, "simulation": 2}  # runs; 1 for all others
_CASES = {
    "ops": ops.cases,
    "steps": steps.cases,
    "columns": columns.cases,
    "scaling": scaling.cases,
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands and options."""
    top = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the speed and accuracy of fastagg. See docs/benchmarks.md.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="subcommand")
    for name, text in SUBCOMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name in (*_CASES, "main"):
            options.add(sub)
        elif module := _MODULES.get(name):
            module.add_options(sub)
        elif name == "accuracy":
            sub.add_argument(
                "--threads",
                type=int,
                default=torch.get_num_threads(),
                help="number of threads; default: %(default)s",
            )
            sub.add_argument(
                "--quick", action="store_true", help="dry run with d = 1e3 and d = 1e4 only"
            )
            sub.add_argument(
                "--max-d", type=int, default=10**8, help="largest d; d = 1e8 needs 8 GB of memory"
            )
            options.add_outputs(sub)
        else:
            sub.add_argument(
                "--out",
                type=Path,
                default=RESULTS,
                metavar="FOLDER",
                help="results folder; default: %(default)s",
            )
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    namespace = parser().parse_args(arguments)
    options.check_numbers(namespace, _LEAST.get(namespace.command, 1))
    console = report.make_console()
    if namespace.command == "pictures":
        folders = (namespace.out, *sorted(namespace.out.glob("*/")))
        if not sum(_draw(folder, console) for folder in folders):
            raise SystemExit(f"--out: expected a folder with results, got {namespace.out}")
    elif namespace.command == "accuracy":
        _accuracy(namespace, console)
    elif namespace.command == "regress":
        sys.exit(regress.run(namespace, console))
    elif module := _MODULES.get(namespace.command):
        module.run(namespace, console)
    elif namespace.command == "main":
        namespace.out = namespace.out or RESULTS
        _time(["ops", "steps"], namespace, console)
        _draw(namespace.out / kind(), console)
    else:
        _time([namespace.command], namespace, console)


def _time(names: Sequence[str], namespace: argparse.Namespace, console: Console) -> None:
    """Run suites and write what they measured, even if Ctrl-C stops one of them."""
    rows: list[Row] = []
    complete = True
    for name in names:
        found = _time_suite(name, namespace, console)
        rows += found.rows
        complete = found.complete
        if not complete:
            break
    if namespace.csv and rows:
        report.write_csv(namespace.csv, report.measured_here(rows))
    if not complete:
        raise SystemExit(STOPPED)


def _time_suite(name: str, namespace: argparse.Namespace, console: Console) -> options.Results:
    chosen = options.parse(namespace)
    if name in ("steps", "columns"):
        peers.announce(console)
    results = options.run(_CASES[name](chosen), chosen, console)
    rows = results.rows
    if not rows and not results.complete:
        return results
    if not rows:
        raise SystemExit(f"--only: no comparison of {name} contains {chosen.only!r} in its name")
    title = f"{report.TITLES[name]}: {chosen.threads} threads, medians of {chosen.repeats}"
    report.show(rows, title, console)
    report.show_headline(rows, console)
    report.show_targets(rows, console)
    if namespace.out:
        folder = namespace.out / kind()
        table = folder / f"{name}.csv"
        some = chosen.only or not results.complete
        measured = report.merge(table, rows) if some else report.measured_here(rows)
        report.write_csv(table, measured)
        report.write_table_page(table)
        console.print(f"written: {name}.csv and {name}.md in {folder}")
    return results


def _accuracy(namespace: argparse.Namespace, console: Console) -> None:
    errors = accuracy.run(namespace, console)
    accuracy.show(errors, console)
    if namespace.csv:
        accuracy.write_csv(namespace.csv, errors)
    if namespace.out:
        accuracy.write_csv(namespace.out / "accuracy.csv", errors)
        accuracy.write_markdown(namespace.out / "accuracy.md", errors)
        _draw(namespace.out, console)


def _draw(folder: Path, console: Console) -> int:
    """Draw every picture whose CSV file is in the folder; return their number."""
    drawn = 0
    for table, picture, draw in (
        ("ops.csv", "roofline.png", pictures.roofline),
        ("accuracy.csv", "accuracy.png", pictures.accuracy),
    ):
        if (folder / table).exists():
            console.print(f"drawn: {draw(folder / table, folder / picture)}")
            drawn += 1
    return drawn


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: `timeout` sends it
    main(sys.argv[1:])
