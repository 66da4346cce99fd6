# SPDX-License-Identifier: Apache-2.0
"""Call every op, wrapped and raw, and every rule with hostile arguments.

    make fuzz                                # 10^6 calls
    make fuzz ARGS="--calls 20000 --seed 3"
    python -m tests.fuzz.ops --replay tests/fuzz/corpus/ops.jsonl

A case is a valid call and up to three mutations of its arguments; it follows from its seed.
Batches of cases run in processes that may die. What must not happen: the death of the process, a
call that takes LONGEST seconds of the processor or does not return, an exception that is neither
ours nor documented, bits that an exception or a call with other outputs has changed, and a step
that makes parameters or state infinite. Each such case is shrunk to few mutations and printed as a
line of the corpus.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import inspect
import json
import mmap
import os
import random
import re
import signal
import struct
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator, ops
from fastagg.ops._dispatch import TABLE
from fastagg.ops._examples import ExampleData
from tests.fuzz.mutations import NUMBERS, TENSORS
from tests.rules.conftest import CONFIGURATIONS

CORPUS = Path(__file__).parent / "corpus" / "ops.jsonl"
LONGEST = 30  # seconds of the processor for a call
NEVER = 20 * LONGEST  # seconds after which a call that waits does not return any more
BATCH = 2000  # cases of a process
SIZES = [(9, 7, 130), (9, 7, 1), (5, 1, 64), (5, 2, 7), (12, 12, 2500), (5, 4, 70_001)]
CHOICES = [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 5]
# Errors of torch that say what is wrong: of its argument parser, its autograd, and no memory.
DOCUMENTED = re.compile(
    r"Expected a value of type|expected at most|missing value for argument|"
    r"leaf Variable that requires grad|a view of a leaf Variable|A view was created in|"
    r"is a view and is being modified inplace|is not differentiable, but one of its tensors|"
    r"Overflow when unpacking|can't allocate memory|ZeroTensors are immutable|"
    r"Cannot set version_counter for inference tensor|Inplace update to inference tensor|"
    r"There were no tensor arguments|Unable to cast .* to Tensor|Could not|is not a sequence|"
    r"on undefined tensor",
    re.DOTALL,
)
OURS = (TypeError, ValueError, IndexError, MemoryError)
Case = dict[str, Any]


class Finding(Exception):
    """Raised if a call did what it must not do."""


# --- cases ------------------------------------------------------------------------------------


def draw_case(seed: int, index: int) -> Case:
    """Return case ``index`` of a run, as JSON."""
    draw = random.Random(f"{seed} {index}")
    size = draw.choice(CHOICES)
    case: Case = {"seed": seed, "index": index, "size": size, "threads": draw.choice([1, 1, 1, 3])}
    if draw.random() < 0.12:
        case |= {"rule": draw.randrange(len(CONFIGURATIONS))}
        names = ["params", "updates", "updates", "clients", "clients", "options", "ages"]
    else:
        case |= {"op": draw.choice(sorted(TABLE)), "raw": draw.random() < 0.4}
        case["call"] = draw.randrange(len(examples(case["op"], size)))
        names = list(examples(case["op"], size)[case["call"]][0])
    count = draw.choice([0, 1, 1, 1, 2, 2, 3])
    case["mutations"] = [
        [draw.choice(names), draw.choice(sorted(TENSORS)), draw.randrange(2**32)]
        for _ in range(count)
    ]
    return case


@functools.cache
def examples(op: str, size: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the valid calls of an op: the arguments of its wrapper, and those of its schema."""
    wrapped: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    TABLE[op].example(lambda *a, **k: wrapped.append((a, k)), ExampleData.random(*SIZES[size]))
    signature = inspect.signature(TABLE[op].wrapper)
    found = []
    for positional, named in wrapped:
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        found.append((dict(bound.arguments), {}))
    return found


@functools.cache
def schema_of(op: str) -> torch.FunctionSchema:
    return getattr(torch.ops.fastagg, op).default._schema


def changed_names(op: str) -> set[str]:
    """Return the names of the arguments that an op changes."""
    return {a.name for a in schema_of(op).arguments if a.alias_info and a.alias_info.is_write}


def raw_arguments(op: str, given: dict[str, Any]) -> list[Any]:
    """Return the arguments of the schema for those of a wrapper."""
    values = []
    for argument in schema_of(op).arguments:
        value = given.get(argument.name)
        if isinstance(value, Tensor) and "Tensor[]" in str(argument.type).replace(
            "List[Tensor]", "Tensor[]"
        ):
            value = [value]
        if value is None and argument.name in ("references", "kept"):
            value = []
        values.append(value)
    return values


def mutated(case: Case, given: dict[str, Any], changed: set[str]) -> dict[str, Any]:
    """Apply the mutations of a case to copies of valid arguments."""
    given, cut, protected = copy.deepcopy(given), set[str](), False
    lists = {name for name, value in given.items() if isinstance(value, list | tuple)}
    for name, kind, seed in case["mutations"]:
        if name in cut:
            continue  # torch itself reads beyond a storage that was resized
        if kind == "resized":
            cut.add(name)
        draw = random.Random(seed)
        value = given.get(name)
        near = [v for key, v in given.items() if key not in (name, *cut)]
        others = [t for v in near for t in tensors_in(v) if plain(t)]
        if kind == "read_only" and name in changed:
            continue
        if kind == "aliased" and name in changed and protected:
            continue  # every write of torch's to such memory ends the process, too
        protected = protected or kind == "read_only"
        listed = isinstance(value, list | tuple)
        flat = listed and all(isinstance(item, Tensor) for item in value)
        if kind in ("resized", "huge") and listed and not (flat and name in lists):
            continue  # torch itself prints the items: those that share the storage, or all of them
        if any(huge(t) or t.is_nested or t.is_quantized for t in tensors_in(value)):
            continue  # a variant of a huge view would take its memory; torch dies making the others
        try:
            if isinstance(value, Tensor):
                given[name] = TENSORS[kind](value, draw, others)
            elif isinstance(value, list | tuple) and value and draw.random() < 0.8:
                items = list(value)
                place = draw.randrange(len(items))
                if isinstance(items[place], Tensor):
                    near = [t for t in tensors_in(items[:place]) if plain(t)]
                    items[place] = TENSORS[kind](items[place], draw, [*others, *near])
                given[name] = items
            else:
                given[name] = draw.choice(NUMBERS)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            continue  # torch cannot make this variant
    return given


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def huge(t: Tensor) -> bool:
    return t.numel() > 10**6 or (not t.is_nested and any(size > 10**6 for size in t.shape))


def plain(t: Tensor) -> bool:
    return (
        t.layout == torch.strided
        and t.device.type == "cpu"
        and not (t.is_nested or t.is_quantized or t._is_zerotensor())
    )


# --- what a call may do -----------------------------------------------------------------------


class Snapshot:
    """The bytes of the memory behind some values."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._kept: dict[tuple[int, str], tuple[str, Tensor, Tensor]] = {}
        for name, value in values.items():
            for t in tensors_in(value):
                if plain(t) and t.untyped_storage().nbytes():
                    key = t.untyped_storage()._cdata, name
                    if key not in self._kept:
                        self._kept[key] = name, t, memory_of(t)

    def changed(self, exempt: set[str] = frozenset()) -> list[str]:
        """Return the names of values whose memory has changed.

        ``exempt`` values may have changed, and those that share memory with them.
        """
        allowed = {
            t.untyped_storage().data_ptr() for name, t, _ in self._kept.values() if name in exempt
        }
        return [
            name
            for name, t, before in self._kept.values()
            if t.untyped_storage().data_ptr() not in allowed
            and not torch.equal(memory_of(t, copied=False), before)
        ]


def memory_of(t: Tensor, copied: bool = True) -> Tensor:
    raw = torch.empty(0, dtype=torch.uint8)
    with torch.no_grad():
        raw.set_(t.detach().untyped_storage())
    return raw.clone() if copied else raw


def judge(error: BaseException) -> None:
    """Raise Finding if an exception is neither ours nor documented."""
    text = f"{type(error).__name__}: {error}"
    if "INTERNAL ASSERT" in text or "report a bug" in text:
        raise Finding(text[:300]) from error
    if isinstance(error, OURS) or DOCUMENTED.search(text):
        return
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename.endswith("_tensor_str.py"):
        return  # torch refuses an argument, and fails to print it
    raise Finding(text[:300]) from error


def call_op(case: Case) -> str:
    """Run a case of an op; return "returned" or "refused"."""
    op = case["op"]
    changed = changed_names(op)
    given = mutated(case, examples(op, case["size"])[case["call"]][0], changed)
    before = Snapshot(given)
    try:
        if case["raw"]:
            getattr(torch.ops.fastagg, op)(*raw_arguments(op, given))
        else:
            # by position where possible, as callers do
            kinds = inspect.signature(TABLE[op].wrapper).parameters
            named = {
                k: v for k, v in given.items() if kinds[k].kind == inspect.Parameter.KEYWORD_ONLY
            }
            getattr(ops, op)(*(v for k, v in given.items() if k not in named), **named)
    except Exception as error:
        judge(error)
        found = before.changed()
        if found:
            raise Finding(f"changed {found} and raised {error}") from error
        return "refused"
    found = before.changed(changed)
    if found:
        raise Finding(f"changed {found}, which are inputs")
    return "returned"


def call_rule(case: Case) -> str:
    """Run a case of a rule: steps with hostile arguments between ordinary ones."""
    name, options = CONFIGURATIONS[case["rule"]]
    d = SIZES[case["size"]][2]
    draw = random.Random(case["index"])
    options = {"num_clients": 6, "num_params": d, **options}
    for target, _, seed in case["mutations"]:
        if target == "options":
            which = random.Random(seed)
            key = which.choice([*options, "server_lr", "max_norm", "nonfinite", "iterations", "x"])
            options[key] = which.choice(NUMBERS)
            if key.startswith("num_") and isinstance(options[key], int) and options[key] > 7:
                options[key] = 2  # valid, and would take all memory
    generator = torch.Generator().manual_seed(case["index"])
    params = torch.randn(d, generator=generator)
    try:
        agg: Aggregator = fastagg.make(name, **options)
        if agg.num_params * agg.num_clients > 10**7:
            return "refused"
        agg.step(torch.zeros(agg.num_params), torch.ones(1, agg.num_params), [0])
    except Exception as error:
        judge(error)
        return "refused"
    sizes = [draw.randrange(1, 7), 3]
    result = "returned"
    for turn, size in enumerate(sizes):
        ids = torch.randperm(6, generator=generator)[:size]
        given: dict[str, Any] = {
            "params": params,
            "updates": torch.randn(size, d, generator=generator),
            "clients": ids,
        }
        if agg.staleness is not None:
            given["ages"] = ids % 2
        if turn == 0:
            given = mutated(case, given, {"params"})
        result = step(agg, given, result)
    return result


def step(agg: Aggregator, given: dict[str, Any], result: str) -> str:
    state, before = agg.state_dict(), Snapshot(given)
    try:
        agg.step(given["params"], given["updates"], given["clients"], ages=given.get("ages"))
    except Exception as error:
        judge(error)
        found = before.changed()
        after = agg.state_dict()
        found += [k for k in state if not same_bits(after[k], state[k])]
        if found:
            raise Finding(f"step changed {found} and raised {error}") from error
        return "refused"
    found = before.changed({"params"})
    if found:
        raise Finding(f"step changed {found}, which are inputs")
    finite = torch.isfinite(given["params"]).all()
    if not (finite and all(torch.isfinite(v).all() for v in agg.state_dict().values())):
        raise Finding("step returned, and parameters or state are not finite")
    return result


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def run_case(case: Case) -> str:
    torch.set_num_threads(case["threads"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call_rule(case) if "rule" in case else call_op(case)


# --- processes that may die -------------------------------------------------------------------

_RECORD = struct.Struct("qqq")  # cases done, calls that returned, calls that were refused


def run_batch(cases: list[Case], found: Counter[str]) -> list[tuple[Case, str]]:
    """Run cases in one process after another, until all are done; return the findings."""
    findings: list[tuple[Case, str]] = []
    begin = 0
    while begin < len(cases):
        shared = mmap.mmap(-1, _RECORD.size + 4096)
        child = os.fork()
        if child == 0:
            _work(cases[begin:], shared)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        done, returned, refused = _RECORD.unpack(shared[: _RECORD.size])
        found["returned"] += returned
        found["refused"] += refused
        if status == 0:
            break
        case = cases[begin + done]
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            too_long = number in (signal.SIGALRM, signal.SIGPROF)
            text = "hang" if too_long else f"died by {signal.Signals(number).name}"
        elif os.WEXITSTATUS(status) == 3:
            text = shared[_RECORD.size :].rstrip(b"\0").decode(errors="replace")
        else:
            text = f"ended with status {os.WEXITSTATUS(status)}"  # a report of a sanitizer
        findings.append((case, text))
        begin += done + 1
    return findings


def _work(cases: list[Case], shared: mmap.mmap) -> None:
    results = Counter[str]()
    for done, case in enumerate(cases):
        shared[: _RECORD.size] = _RECORD.pack(done, results["returned"], results["refused"])
        signal.setitimer(signal.ITIMER_PROF, LONGEST)  # ends the process
        signal.alarm(NEVER)
        try:
            results[run_case(case)] += 1
        except Finding as error:
            text = str(error).encode()[:4000]
            shared[_RECORD.size : _RECORD.size + len(text)] = text
            os._exit(3)
        except BaseException as error:
            text = f"the fuzzer itself: {error!r}".encode()[:4000]
            shared[_RECORD.size : _RECORD.size + len(text)] = text
            os._exit(3)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)
    shared[: _RECORD.size] = _RECORD.pack(len(cases), results["returned"], results["refused"])


def shrink(case: Case) -> Case:
    """Remove what a case does not need to go wrong."""
    trials: list[Case] = [{**case, "threads": 1}]
    trials += [{**case, "size": size} for size in (1, 3, 2)]
    for trial in trials:
        if run_batch([trial], Counter()):
            case = trial
            break
    k = 0
    while k < len(case["mutations"]):
        fewer = case["mutations"][:k] + case["mutations"][k + 1 :]
        if run_batch([{**case, "mutations": fewer}], Counter()):
            case = {**case, "mutations": fewer}
        else:
            k += 1
    return case


def kind_of(case: Case, text: str) -> str:
    """Return a key under which equal findings are counted once."""
    what = case.get("op") or CONFIGURATIONS[case["rule"]][0]
    return f"{what}: {re.sub(r'[0-9]+', '0', text)[:60]}"


def main(arguments: list[str] | None = None) -> int:
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("--calls", type=int, default=1_000_000)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--replay", type=Path, help="run the cases of this corpus instead")
    options = command.parse_args(arguments)
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # some cases use it, each process would import it
    results, kinds = Counter[str](), Counter[str]()
    begin = time.perf_counter()
    cases = [] if options.replay is None else read_corpus(options.replay)
    total = len(cases) or options.calls
    for first in range(0, total, BATCH):
        last = min(first + BATCH, total)
        batch = cases[first:last] or [draw_case(options.seed, k) for k in range(first, last)]
        for case, text in run_batch(batch, results):
            kinds[kind_of(case, text)] += 1
            if kinds[kind_of(case, text)] == 1:
                print(json.dumps(shrink(case) | {"found": text[:300]}), flush=True)
    seconds = time.perf_counter() - begin
    print(
        f"{total} calls in {seconds:.0f} s: {results['returned']} returned, "
        f"{results['refused']} refused, {kinds.total()} went wrong"
    )
    for kind, times in kinds.most_common():
        print(f"  {kind}: {times}")
    return 1 if kinds else 0


def read_corpus(path: Path) -> list[Case]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


if __name__ == "__main__":
    sys.exit(main())
