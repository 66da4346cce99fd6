# SPDX-License-Identifier: Apache-2.0
"""The program of the ranks in tests/distributed: each runs ``main(job, folder, rank, ranks)``.

Each job writes its results to ``FOLDER/JOB-RANK.pt`` and its output to ``FOLDER/JOB-RANK.log``. The
tests read both files and run the same rounds in one process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastagg
from fastagg.distributed import ShardedAggregator
from fastagg.updates.streams import ColumnBlocks

K, D, SEGMENT = 6, 5_003, 1_024  # five segments, the last one short
ROUNDS = 4
TIMEOUTS = {"killed": 20.0, "hung": 3.0}  # seconds, of the group of ranks

WEIGHTS = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
RULES: list[tuple[str, dict[str, Any]]] = [
    ("amplified", {"beta": 2.0}),
    ("bucketing", {"rule": "centered-clip", "rule_options": {"tau": 90.0}}),
    ("bulyan", {"reuse": True}),
    ("centered-clip", {"tau": 90.0, "reuse": True}),
    ("fdms", {"max_norm": 100.0}),  # about half of the rows are longer
    ("fdms", {"similarity": "distance", "elimination": "theorem2"}),
    ("fdms", {"sketch": 256, "elimination": "theorem2", "max_norm": 100.0}),
    ("fdms-means", {"sketch": 64, "max_norm": 100.0}),
    ("fdms-means", {"sketch": 64, "client_weights": WEIGHTS}),
    ("fdms", {"clip_norm": 90.0, "similarity": "distance"}),
    ("fdms-soft", {"friends": 2, "max_share": 0.3}),
    ("fdms-soft", {"sketch": 64, "similarity": "distance"}),
    ("fdms", {"staleness": "hinge"}),
    ("fedau", {"cutoff": 2}),
    ("fedavg", {"client_weights": WEIGHTS}),
    ("fedavg", {"server_optimizer": "adam", "server_lr": 0.1, "min_active": 2}),
    ("fedavg", {"max_norm": {"multiple": 1.001, "window": 4, "warmup": 0}}),
    ("fedbuff", {"staleness": "polynomial"}),
    ("fedstale", {"beta": 0.3, "cutoff": 2}),
    ("fedavg", {"clip_norm": {"initial": 90.0}}),
    ("fedvarp", {"server_lr": 0.7}),
    ("geometric-median", {"client_weights": WEIGHTS}),
    ("geometric-median", {"reuse": True, "max_age": 1}),
    ("krum", {"reuse": True, "memory_dtype": "bfloat16"}),
    ("meamed", {"num_byzantine": 1}),
    ("median", {"max_norm": 100.0}),
    ("mifa", {"memory_dtype": "bfloat16", "max_norm": 100.0}),
    ("mifa", {"memory_dtype": "int8", "max_norm": 100.0}),
    ("mifa-client", {"client_weights": WEIGHTS, "max_norm": 100.0}),
    ("mifa", {"memory_dtype": "int8", "clip_norm": 90.0}),
    ("multi-krum", {"memory_dtype": "int8", "reuse": True}),
    ("mimic", {"server_lr": 0.7}),
    ("mimic", {"staleness": "constant", "max_staleness": 2}),
    ("mimic-aged", {"fading": 0.5}),
    ("multi-krum", {"keep": 2}),
    ("multi-krum", {"keep": 2, "sketch": 128, "seed": 4}),
    ("nnm", {"num_byzantine": 1, "reuse": True}),
    ("scaffold", {"local_work": 0.5}),
    ("stale", {"max_age": 1}),
    ("stale", {"staleness": "constant"}),
    ("stale-models", {"server_lr": 0.7}),
    ("stale-models", {"server_optimizer": "momentum"}),
    ("trimmed-mean", {"num_byzantine": 1}),
]


def rounds(first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rounds [first, last): updates [S, D] and clients [S].

    Round 2 has no clients. In round 3, updates are nearly equal.
    """
    for t in range(first, last):
        generator = torch.Generator().manual_seed(100 + t)
        clients = torch.randperm(K, generator=generator)[: 0 if t == 2 else 4]
        groups, spread = (1, 1e-4) if t == 3 else (2, 1.0)
        common = torch.randn(2, D, generator=generator)[clients % groups]
        yield common + spread * torch.randn(len(clients), D, generator=generator), clients


def ages_of(options: dict[str, Any], t: int, clients: Tensor) -> Tensor | None:
    """Ages [S] of the rows of round t, for a rule with these options."""
    return (clients + t).remainder(3).clamp(max=t) if "staleness" in options else None


def first_params() -> Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(99))


def split(agg: ShardedAggregator, updates: Tensor) -> Tensor:
    return updates[:, agg.begin : agg.end]  # a strided view


def round_weights(rule: fastagg.Aggregator, clients: Tensor) -> Tensor | None:
    """Return weights of a round, for rules that take them."""
    return None if rule.no_weights else 1.0 + clients % 3


def follow(agg: ShardedAggregator, params: Tensor, first: int, last: int) -> list[list[float]]:
    weights = []
    options = {} if agg.local.staleness is None else {"staleness": agg.local.staleness}
    for t, (updates, clients) in enumerate(rounds(first, last), start=first):
        own, ages = split(agg, updates), ages_of(options, t, clients)
        counts = round_weights(agg.local, clients)
        if t % 2 and len(own):  # the same rows from a stream
            blocks = ColumnBlocks(
                lambda own=own: iter(own.split(700, dim=1)),
                num_rows=len(own),
                num_params=agg.num_own,
            )
            report = agg.step(params, blocks, clients, ages=ages, weights=counts)
        else:
            report = agg.step(params, own, clients, ages=ages, weights=counts)
        weights.append(report.weights.tolist())
    return weights


def job_equal(folder: Path) -> Any:
    """Run every rule for a few rounds and write a checkpoint of each at the end."""
    results = []
    for number, (name, options) in enumerate(RULES):
        agg = ShardedAggregator(name, num_clients=K, num_params=D, segment=SEGMENT, **options)
        params = agg.own(first_params())
        weights = follow(agg, params, 0, ROUNDS)
        agg.save(folder / f"checkpoint-{number}", columns={"params": params})
        results.append((agg.gather(params), weights))
    return results


def job_resume(folder: Path) -> Any:
    """Resume from the checkpoints of job_equal with any number of ranks."""
    results = []
    for number in range(len(RULES)):
        agg, columns, _ = ShardedAggregator.load(folder / f"checkpoint-{number}")
        params = columns["params"]
        follow(agg, params, ROUNDS, 2 * ROUNDS)
        state = {
            name: agg.gather(value, block=agg.local.column_blocks.get(name, 1))
            if name in agg.local.whole_column_state
            else value
            for name, value in agg.state_dict().items()
        }
        results.append((agg.gather(params), state))
    return results


GROWN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fedavg", {"client_weights": WEIGHTS}, {"client_weights": [*WEIGHTS, 2.0, 6.0]}),
    ("stale-models", {}, {}),
    ("fedstale", {}, {}),
    ("mimic", {}, {}),
    ("mifa", {"memory_dtype": "int8"}, {}),
    ("geometric-median", {"reuse": True}, {}),
]
"""Rules, their options, and those with which they grow by two clients."""


def churn(agg: Any, params: Tensor, own: Callable[[Tensor], Tensor], more: dict[str, Any]) -> None:
    """Run rounds before and after the rule grows and forgets."""
    for updates, clients in rounds(0, 2):
        agg.step(params, own(updates), clients)
    agg.grow(K + 2, **more)
    agg.forget([1, 4])
    for t, (updates, clients) in enumerate(rounds(2, 5)):
        agg.step(params, own(updates), (clients + t) % (K + 2))


def job_grow(folder: Path) -> Any:
    results = []
    for name, options, more in GROWN:
        agg = ShardedAggregator(name, num_clients=K, num_params=D, segment=SEGMENT, **options)
        params = agg.own(first_params())
        churn(agg, params, lambda rows, agg=agg: split(agg, rows), more)
        results.append(agg.gather(params))
    rank = dist.get_rank()
    agg = ShardedAggregator("mifa", num_clients=K, num_params=D)
    said = [
        outcome(lambda: agg.grow(K + 1 + rank)),
        outcome(lambda: agg.grow(K - 1)),
        outcome(lambda: agg.forget([rank])),
        outcome(lambda: agg.forget([K])),
    ]
    kept = ShardedAggregator("mifa-client", num_clients=K, num_params=D, segment=SEGMENT)
    updates = torch.arange(1.0, 4.0)[:, None].expand(3, kept.num_own).contiguous()
    kept.step(kept.own(first_params()), updates, [1, 3, 4])
    bad = updates[1:].clone()
    bad[1, 2] += 1e300 if rank == 1 else 0.0
    said += [
        outcome(lambda: kept.withdraw(bad, [3, 4])),
        outcome(lambda: kept.withdraw(updates[1:], [3, 4 - rank])),
        outcome(lambda: kept.withdraw(updates[1:], [3, 4])),
    ]
    first = torch.ones(K, agg.num_own)
    agg.step(agg.own(first_params()), first, range(K))
    total = agg.local.state_dict()["total"]
    if rank == 1:  # it fails after the others have begun
        agg.local._total_without = no_memory  # type: ignore[attr-defined]
    said.append(outcome(lambda: agg.forget([0])))
    if rank == 1:
        del agg.local._total_without  # type: ignore[attr-defined]
    said.append(str(torch.equal(agg.local.state_dict()["total"], total)))
    state = kept.state_dict()
    return results, said, agg.num_clients, state["answers"], kept.gather(state["total"])


def no_memory(_: object) -> None:
    raise MemoryError("no memory")


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def breaking(agg: ShardedAggregator, odd: bool) -> ColumnBlocks:
    """Return a stream of columns that ends too early if ``odd``."""
    blocks = [torch.ones(3, agg.num_own - 5), *([] if odd else [torch.ones(3, 5)])]
    return ColumnBlocks(lambda: blocks, num_rows=3, num_params=agg.num_own)


def in_own_folder(folder: Path, rank: int) -> ShardedAggregator:
    """Make a rule in a working directory per rank; only rank 0 has the memory folder."""
    home = folder / f"home-{rank}"
    home.mkdir()
    if rank == 0:
        (home / "rows").mkdir()
    before = Path.cwd()
    os.chdir(home)
    try:
        return ShardedAggregator("mifa", num_clients=K, num_params=D, memory_folder="rows")
    finally:
        os.chdir(before)


def save(agg: ShardedAggregator, folder: Path, column: torch.Tensor) -> None:
    agg.save(folder / "columns", columns={"m": column})


def job_refuse(folder: Path) -> Any:
    """Cause errors on one rank only; the steps in between succeed."""
    rank = dist.get_rank()
    agg = ShardedAggregator("mifa", num_clients=K, num_params=D, nonfinite="drop")
    strict = ShardedAggregator("fdms", num_clients=K, num_params=D)
    mean = ShardedAggregator("fedavg", num_clients=K, num_params=D)
    params = agg.own(first_params())
    before = agg.gather(params)
    updates = torch.ones(3, agg.num_own)
    bad = updates.clone()
    bad[1, 7] = float("nan")
    odd = rank == 1
    seen = {
        "shape": outcome(lambda: agg.step(params, updates[:, : -1 if odd else None], [0, 1, 2])),
        "clients": outcome(lambda: agg.step(params, updates, [0, 1, 3 if odd else 2])),
        "ages": outcome(lambda: agg.step(params, updates, [0, 1, 2], ages=[0, int(odd), 0])),
        "weights": outcome(
            lambda: mean.step(params, updates, [0, 1, 2], weights=[1, 1, 2 if odd else 1])
        ),
        "options": outcome(lambda: ShardedAggregator("mifa", num_clients=K + rank, num_params=D)),
        "save": outcome(lambda: agg.save(folder / ("missing/\0" if odd else "good"))),
        "shapes": outcome(lambda: save(agg, folder, torch.zeros(2 + rank, agg.num_own))),
        "dtypes": outcome(
            lambda: save(agg, folder, torch.zeros(agg.num_own, dtype=(torch.int64, None)[rank]))
        ),
        "folder": outcome(lambda: in_own_folder(folder, rank)),
        "load": outcome(lambda: ShardedAggregator.load(folder / "nothing")),
        "read": outcome(lambda: agg.step(params, breaking(agg, odd), [0, 1, 2])),
        "again": outcome(lambda: agg.step(params, breaking(agg, odd), [0, 1, 2])),
        "gather": outcome(lambda: agg.gather(params[: -1 if odd else None])),
        "nan": outcome(lambda: strict.step(params, bad if odd else updates, [0, 1, 2])),
    }
    seen["unchanged"] = bool(torch.equal(agg.gather(params), before))
    report = agg.step(params, bad if odd else updates, [5, 1, 3])  # client 1's row is not finite
    seen["rejected"] = report.rejected.tolist()
    seen["active"] = report.active.tolist()
    return seen


def job_killed(folder: Path) -> Any:
    """Kill rank 1 in the middle of the step of round 3; the checkpoint is from round 1."""
    agg = ShardedAggregator(
        "geometric-median", num_clients=K, num_params=D, segment=SEGMENT, group=short("killed")
    )
    params = agg.own(first_params())
    follow(agg, params, 0, 2)
    agg.save(folder / "checkpoint", columns={"params": params}, notes={"rounds": 2})
    follow(agg, params, 2, 3)
    before, rank = params.clone(), dist.get_rank()
    if rank == 1:
        agg.local.columns.join_peaks = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    start = time.monotonic()
    said = outcome(lambda: follow(agg, params, 3, 4))
    return said, time.monotonic() - start, bool(torch.equal(params, before))


def job_hung(folder: Path) -> Any:
    """Let rank 1 wait longer than the timeout."""
    agg = ShardedAggregator("fedavg", num_clients=K, num_params=D, group=short("hung"))
    params = agg.own(first_params())
    before = params.clone()
    if dist.get_rank() == 1:
        time.sleep(TIMEOUTS["hung"] + 1.0)
    start = time.monotonic()
    said = outcome(lambda: follow(agg, params, 0, 1))
    return said, time.monotonic() - start, bool(torch.equal(params, before))


def short(job: str) -> dist.ProcessGroup:
    """Return the group of all ranks, with the timeout of the job; all ranks have connected."""
    dist.barrier()
    return dist.new_group(timeout=timedelta(seconds=TIMEOUTS[job]))


def job_restarted(folder: Path) -> Any:
    agg, columns, notes = ShardedAggregator.load(folder / "checkpoint")
    params = columns["params"]
    follow(agg, params, notes["rounds"], 6)
    return agg.gather(params)


def main(job: str, folder: Path, rank: int, ranks: int) -> None:
    log = os.open(folder / f"{job}-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{job}.store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),  # for the rendezvous on a busy machine
    )
    result = globals()[f"job_{job}"](folder)
    torch.save(result, folder / f"{job}-{rank}.pt")
    if job not in TIMEOUTS:
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a broken group may block at exit
