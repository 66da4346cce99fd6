# SPDX-License-Identifier: Apache-2.0
"""Times cases with the fastagg of one tree; :mod:`benchmarks.regress.compare` starts two of it.

It uses the public interface only, so it also runs with earlier commits. It is run as a script, from
a folder without modules whose names others use. It reads one command a line from standard input and
answers each with one line of JSON::

    list                 -> ["step mifa S=10 d=610 copied", ...]
    prepare CASE REPEATS -> {"calls": n}, or {"error": "why this tree cannot run the case"}
    time                 -> {"seconds": median time of a call over the repeats}
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import fastagg
from fastagg import ops

Call = Callable[[], object]

# Options by label: the name of a rule, and after a comma what tells two of it apart.
RULES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "amplified": {},
    "fedau": {},
    "fedbuff": {},
    "fdms": {},
    "fdms-soft": {},
    "fdms-means": {},
    "mimic": {},
    "mimic, client": {"mode": "client"},
    "mimic-aged": {},
    "mifa": {},
    "mifa, bfloat16": {"memory_dtype": "bfloat16"},
    "mifa, int8": {"memory_dtype": "int8"},
    "mifa-client": {},
    "stale": {},
    "stale-models": {},
    "fedvarp": {},
    "fedstale": {},
    "scaffold": {"local_work": 0.1},
    "centered-clip": {"tau": 1.0},
    "krum": {"num_byzantine": 1},
    "multi-krum": {"num_byzantine": 1},
    "bulyan": {"num_byzantine": 1},
    "nnm": {"num_byzantine": 1},
    "bucketing": {},
    "geometric-median": {},
    "median": {},
    "trimmed-mean": {"num_byzantine": 1},
    "meamed": {"num_byzantine": 1},
}
SIZES = [(10, 610), (100, 610), (10, 62_006), (100, 62_006), (20, 1_000_000)]
OPS_SIZES = [(10, 610), (20, 62_006), (20, 1_000_000), (512, 10_000)]
MORE_SIZES = {
    "gram": [(100, 1_000_000)],  # long blocks, packed
    "sketch_": [(100, 1_000_000), (1000, 100_000)],
    "sketch_and_sum_": [(100, 1_000_000)],
    "quantized_total_": [(100, 1_000_000)],
}  # besides OPS_SIZES
SEARCHES = [(50, 30, 256), (20_000, 200, 256), (2_000, 10_000, 256)]  # queries, rows, k
FORMS = ("copied", "owned")
COHORTS = 8  # cohorts of S of 2 S clients, in turn


def rule_name(label: str) -> str:
    """Return the name of the rule of a label of RULES."""
    return label.split(",")[0]


def step_call(rule: str, S: int, d: int, form: str) -> Call:
    """Return a call that runs one step; "owned": the rule may take the rows of a buffer."""
    torch.manual_seed(0)
    K = 2 * S
    make: Any = fastagg.make  # an older tree has no RuleName
    agg = make(rule_name(rule), num_clients=K, num_params=d, **RULES[rule])
    params = torch.zeros(d)
    cohorts = [torch.randperm(K)[:S] for _ in range(COHORTS)]
    if form == "owned":
        buffer = fastagg.UpdateBuffer(K, d)
        for client in range(K):
            buffer.row(client).normal_().mul_(0.01)
        updates: object = buffer
    else:
        updates = torch.randn(S, d).mul_(0.01)
    turn = 0

    def call() -> None:
        nonlocal turn
        agg.step(params, updates, cohorts[turn % COHORTS])
        turn += 1

    return call


def op_call(name: str, S: int, d: int) -> Call:
    torch.manual_seed(0)
    rows, weights = torch.randn(S, d), torch.rand(S)
    params, total = torch.randn(d), torch.randn(d, dtype=torch.float64)
    if name == "gram":
        return lambda: ops.gram(rows)
    if name == "abs_max":
        return lambda: ops.abs_max(rows)
    if name == "weighted_sum_":
        return lambda: ops.weighted_sum_(params, rows, weights, beta=0.5)
    if name in ("sketch_", "sketch_and_sum_"):
        sums = torch.zeros(S, 1024, dtype=torch.float64)
        squares = torch.zeros(S, dtype=torch.float64)
        if name == "sketch_":
            return lambda: ops.sketch_(sums, squares, rows, 5)
        return lambda: ops.sketch_and_sum_(params, sums, squares, rows, weights, 5)
    clients = torch.arange(S)
    if name in ("quantize_", "quantized_total_"):
        scales = torch.rand(2, S, -(-d // 256)) / 100  # a scale for 256 columns
        kept, old = torch.randint(-127, 128, (2, S, d), dtype=torch.int8)
        if name == "quantize_":
            return lambda: ops.quantize_([*kept], scales[0], rows)
        out, peaks = torch.zeros_like(total), torch.zeros(S)
        memory_of = [*old], [*scales[1]]
        return lambda: ops.quantized_total_(
            out, peaks, total, *memory_of, rows, clients, weights, [*kept], scales[0]
        )
    assert name == "memory_update_"
    memory = torch.randn(S, d)
    return lambda: ops.memory_update_(params, total, memory, rows, clients, weights, 0.1, 1.0)


def search_call(queries: int, rows: int, k: int) -> Call:
    torch.manual_seed(0)
    asked, among = (torch.randint(-127, 128, (n, k), dtype=torch.int8) for n in (queries, rows))
    factors = 1.0 / among.float().norm(dim=1)
    return lambda: ops.most_similar(asked, among, factors)


OPS = (
    "gram",
    "abs_max",
    "weighted_sum_",
    "sketch_",
    "sketch_and_sum_",
    "memory_update_",
    "quantize_",
    "quantized_total_",
)


def cases() -> dict[str, Callable[[], Call]]:
    """Return all cases by name."""
    found: dict[str, Callable[[], Call]] = {}
    for name in OPS:
        for S, d in (*OPS_SIZES, *MORE_SIZES.get(name, [])):
            found[f"op {name} S={S} d={d}"] = partial(op_call, name, S, d)
    for queries, rows, k in SEARCHES:
        name = f"op most_similar Q={queries} R={rows} k={k}"
        found[name] = partial(search_call, queries, rows, k)
    for rule in RULES:
        for S, d in SIZES:
            for form in FORMS:
                found[f"step {rule} S={S} d={d} {form}"] = partial(step_call, rule, S, d, form)
    return found


def serve() -> None:
    known = cases()
    call: Call | None = None
    repeats = 1
    for line in sys.stdin:
        command, *rest = line.split("\t")
        answer: object
        if command.strip() == "list":
            answer = list(known)
        elif command == "prepare":
            call, repeats, answer = None, 1, {}
            try:
                call = known[rest[0]]()
                for _ in range(3):
                    call()
                start = time.perf_counter()
                call()
                once = time.perf_counter() - start
                repeats = max(1, min(200, int(float(rest[1]) / once)))
                answer = {"calls": repeats}
            except Exception as error:  # an earlier commit may lack the case
                answer = {"error": f"{type(error).__name__}: {error}"}
        else:
            assert call is not None
            seconds = []
            for _ in range(repeats):
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
            answer = {"seconds": statistics.median(seconds)}
        print(json.dumps(answer), flush=True)


def stay_on_cores(count: int) -> None:
    """Use the last ``count`` cores that the process may use, so that both trees use the same.

    Neighbours of a shared machine slow down its cores by different factors.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-count:])


if __name__ == "__main__":
    stay_on_cores(int(sys.argv[1]))
    torch.set_num_threads(int(sys.argv[1]))
    serve()
