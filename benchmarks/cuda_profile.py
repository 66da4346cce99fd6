# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.cuda_profile``: the kernels that fastagg launches, and their times.

For each case of ``benchmarks.cuda``, prints how often a call launches each kernel and how long the
kernel takes, measured by torch's profiler. Their sum is less than the time of the call by the gaps
between launches.

With --bare, each call is made once, between the marks that Nsight Compute looks for::

    ncu --profile-from-start off --clock-control none --set full \\
        python -m benchmarks.cuda_profile --bare --only "gram (64, 10,000,000)"
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from benchmarks.cuda_cases import Case, Way, cases
from fastagg import ops

_CALLS = 5


def short(name: str) -> str:
    """Return the name of a kernel without its namespaces and parameters."""
    name = re.sub(r"\((?:anonymous namespace|unnamed)\)::|^void ", "", name)
    name = re.sub(r"\b(?:\w+::)+(?=\w)", "", name)
    depth = 0
    for index, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            return name[:index]
    return name


def kernels(way: Way, calls: int = _CALLS) -> list[tuple[str, float, float]]:
    """Return (name, launches of one call, microseconds of one launch) of each kernel."""
    from torch.profiler import ProfilerActivity, profile

    way.call(0)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            way.call(0)
        torch.cuda.synchronize()
    found = [
        (short(event.key), event.count / calls, event.device_time_total / event.count)
        for event in profiler.key_averages()
        if event.device_time_total
    ]
    return sorted(found, key=lambda kernel: -kernel[1] * kernel[2])


@contextmanager
def marked(cuda: bool) -> Iterator[None]:
    """Let Nsight Compute profile what is launched in this block."""
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    yield
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def call_once(case: Case, cuda: bool) -> None:
    """Call fastagg twice; the second call is marked."""
    way = case.make().ways[0]
    way.call(0)
    with marked(cuda):
        way.call(0)
    print(case.title, flush=True)


def print_kernels(case: Case) -> None:
    """Print a line for each kernel of a case."""
    found = kernels(case.make().ways[0])
    total = sum(count * each for _, count, each in found)
    print(f"{case.title}: {total:.1f} us in kernels", flush=True)
    for name, count, each in found:
        print(f"  {count * each:10.1f} us = {count:g} x {each:.1f}  {name}", flush=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(prog="python -m benchmarks.cuda_profile", description=__doc__)
    found.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="only cases whose title contains TEXT; may be repeated",
    )
    found.add_argument("--bare", action="store_true", help="one marked call a case, for ncu")
    found.add_argument(
        "--dry-run", action="store_true", help="with --bare: run tiny sizes on the CPU"
    )
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    device = "cpu" if options.dry_run else "cuda"
    if device not in ops.devices():
        raise SystemExit("this build has no CUDA kernels, or there is no GPU")
    show: Callable[[Case], None] = print_kernels
    if options.bare or options.dry_run:
        show = partial(call_once, cuda=device == "cuda")
    failed = 0
    for case in cases(device, options.dry_run):
        if options.only and not any(text in case.title for text in options.only):
            continue
        try:
            show(case)
        except RuntimeError as error:
            print(f"{case.title}: {error}".splitlines()[0], flush=True)
            failed = 1
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return failed


if __name__ == "__main__":
    sys.exit(main())
