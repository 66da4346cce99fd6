# SPDX-License-Identifier: Apache-2.0
"""Let memory run out at every allocation of a step, of every rule.

    make fuzz-memory ARGS="--every 1"

Three kinds of faults, each in processes that may die:

- "one": the n-th allocation of the step fails, and no other, for every n up to the commit. During
  the commit a single allocation cannot fail while there is free memory, and there is: a step makes
  sure of it before its commit.
- "full": from the n-th allocation on, for every n, nothing can be allocated beyond what was in use
  before. Memory that was freed can be allocated again.
- "space": the address space of the process is limited (RLIMIT_AS) to n pages more than it uses.

A step that raises must raise a MemoryError or a RuntimeError with a message (or what torch's
indexing and NumPy raise instead of one: an IndexError, a SystemError), and leave parameters
and state as they were, bit for bit. One that returns must give the bits of an undisturbed step. In
both cases the next step must succeed. The command prints the number of points and what happened.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator
from tests.fuzz.faults import Fault, Faults, build, start, why_not
from tests.rules.conftest import CONFIGURATIONS

K, SMALL = 6, 23
LARGE = 300_000  # parameters, for limits of the address space
THREADS = 2
KINDS = {"one": Fault.ONE_ALLOCATION, "full": Fault.MEMORY_FULL}
MOST_DEATHS = 20  # of the processes of one configuration; then it is given up
_PAGE = 4096


class Case:
    """An aggregator after a round, and a step that is tried again and again."""

    def __init__(self, index: int, num_params: int) -> None:
        self.name, self.options = CONFIGURATIONS[index]
        self.num_params = num_params
        generator = torch.Generator().manual_seed(index)
        self.rounds = [
            (torch.randn(len(ids), num_params, generator=generator), ids)
            for ids in ([4, 0], [3, 0, 2, 5], [1, 2, 4])
        ]
        agg, params = self.start()
        agg.step(params, *self.rounds[1])
        self.after = _bits(agg, params)
        agg.step(params, *self.rounds[2])
        self.then = _bits(agg, params)

    def start(self) -> tuple[Aggregator, Tensor]:
        agg = fastagg.make(self.name, num_clients=K, num_params=self.num_params, **self.options)
        params = torch.zeros(self.num_params)
        agg.step(params, *self.rounds[0])
        return agg, params

    def judge(
        self, agg: Aggregator, params: Tensor, before: dict[str, bytes], error: Exception | None
    ) -> str:
        """Return what happened, after further steps without faults; "wrong ..." if it must not."""
        now = _bits(agg, params)
        if error is None:
            if now != self.after:
                return "wrong: the step returned with other bits"
        else:
            if not (isinstance(error, MemoryError | RuntimeError) and str(error)) and not _else(
                error
            ):
                return f"wrong: {type(error).__name__}: {error}"
            if now != before:
                changed = [name for name in now if now[name] != before[name]]
                return f"wrong: raised {type(error).__name__}, but changed {changed}"
            agg.step(params, *self.rounds[1])
            if _bits(agg, params) != self.after:
                return "wrong: the second attempt gave other bits"
        agg.step(params, *self.rounds[2])
        if _bits(agg, params) != self.then:
            return "wrong: the next step gave other bits"
        return "returned" if error is None else f"raised {type(error).__name__}"


def _else(error: Exception) -> bool:
    """Return whether it is an error that torch or NumPy raise if an allocation fails in them."""
    torchs = isinstance(error, IndexError) and "indexing tensors" in str(error)
    # What Python says of C functions that fail without an exception: NumPy's ufuncs, and indexing.
    silent = ("without setting an exception", "without exception set")
    numpys = isinstance(error, SystemError) and any(words in str(error) for words in silent)
    return torchs or numpys


def _bits(agg: Aggregator, params: Tensor) -> dict[str, bytes]:
    state = {name: value.numpy().tobytes() for name, value in agg.state_dict().items()}
    return state | {"params": params.numpy().tobytes()}


def allocations(index: int, kind: str, begin: int, every: int, note: Path) -> Counter[str]:
    """Let allocations ``begin``, ``begin + every``, ... fail until a step has fewer."""
    faults, found = Faults(), Counter[str]()
    case = Case(index, SMALL)
    n = begin
    while True:
        agg, params = case.start()
        before = _bits(agg, params)
        committing = _Commits(agg, faults)
        note.write_text(str(n))
        error: Exception | None = None
        with faults.armed(KINDS[kind], n):
            try:
                agg.step(params, *case.rounds[1])
            except Exception as raised:
                error = raised
        if not faults.failed and faults.calls < n:
            return found
        if kind == "one" and committing.since is not None and n > committing.since:
            return found  # the n-th allocation was in the commit
        result = case.judge(agg, params, before, error) if faults.failed else "room enough"
        found[result if not result.startswith("wrong") else f"{result} (allocation {n})"] += 1
        n += every


class _Commits:
    """Notes the number of allocations before the commit of a step, which begins with ``_move``."""

    def __init__(self, agg: Aggregator, faults: Faults) -> None:
        self.since: int | None = None
        move: Any = agg._move

        def noting(*arguments: Any) -> Any:
            self.since = faults.calls
            return move(*arguments)

        agg._move = noting  # type: ignore[method-assign]


def address_space(index: int, begin: int, every: int, note: Path) -> Counter[str]:
    """Limit the address space to ``begin``, ``begin + every``, ... pages more than are in use."""
    found, case = Counter[str](), Case(index, LARGE)
    pages = begin
    while True:
        agg, params = case.start()
        before = _bits(agg, params)
        note.write_text(str(pages))
        error: Exception | None = None
        used = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, ((used + pages) * _PAGE, -1))
        try:
            agg.step(params, *case.rounds[1])
        except Exception as raised:
            error = raised
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        result = case.judge(agg, params, before, error)
        found[result if not result.startswith("wrong") else f"{result} ({pages} pages)"] += 1
        if pages > 12 * LARGE * 4 // _PAGE:
            return found
        pages += max(1, (12 * LARGE * 4 // _PAGE) // every)


def child(options: argparse.Namespace) -> None:
    torch.set_num_threads(THREADS)
    note = Path(options.note)
    if options.kind == "space":
        found = address_space(options.index, options.begin, options.every, note)
    else:
        found = allocations(options.index, options.kind, options.begin, options.every, note)
    print(json.dumps(found))


def run(library: Path, index: int, kind: str, every: int, folder: Path) -> Counter[str]:
    """Try every point of a configuration; go on behind a point at which the process dies.

    After ``MOST_DEATHS`` deaths the rest of its points is not tried.
    """
    found, note, begin, deaths = Counter[str](), folder / "note", 0 if kind == "space" else 1, 0
    name = CONFIGURATIONS[index][0]
    while True:
        note.write_text("")
        arguments = [f"--index={index}", f"--kind={kind}", f"--begin={begin}"]
        arguments += [f"--every={every}", f"--note={note}"]
        process = start(library, "tests.fuzz.memory", arguments)
        output, errors = process.communicate()
        if process.returncode == 0:
            found.update(json.loads(output.splitlines()[-1]))
            return found
        if not note.read_text():
            raise RuntimeError(f"{name}: the process did not begin: {errors}")
        begin = int(note.read_text())
        cause = " ".join(errors.split())[:600]
        found[f"wrong: died with {process.returncode} at {kind} {begin}: {cause}"] += 1
        deaths += 1
        if deaths == MOST_DEATHS:
            return found
        begin += every if kind != "space" else max(1, (12 * LARGE * 4 // _PAGE) // every)


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("--every", type=int, default=1, help="try every n-th allocation")
    command.add_argument("--limits", type=int, default=24, help="address-space limits of a rule")
    command.add_argument("--kinds", nargs="+", default=[*KINDS, "space"])
    command.add_argument("--rules", nargs="+", help="only these")
    for hidden in ("--index", "--begin"):
        command.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    for hidden in ("--kind", "--note"):
        command.add_argument(hidden, help=argparse.SUPPRESS)
    return command


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.index is not None:
        child(options)
        return 0
    if reason := why_not():
        print(f"cannot inject faults: {reason}")
        return 2
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        library = build(Path(name))
        for kind in options.kinds:
            total = Counter[str]()
            for index, (rule, _) in enumerate(CONFIGURATIONS):
                if options.rules and rule not in options.rules:
                    continue
                every = options.limits if kind == "space" else options.every
                found = run(library, index, kind, every, Path(name))
                for result in found:
                    if result.startswith("wrong"):
                        print(f"  {rule}: {result}", flush=True)
                total.update(found)
            print(f"{kind}: {total.total()} points", flush=True)
            for result, times in sorted(total.items()):
                if result.startswith("wrong"):
                    wrong += times
                else:
                    print(f"  {result}: {times}")
    print("nothing went wrong" if not wrong else f"{wrong} went wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONMALLOC", "pymalloc")
    sys.exit(main())
