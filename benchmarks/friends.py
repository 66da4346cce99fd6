# SPDX-License-Identifier: Apache-2.0
"""Friends of up to 10^6 clients: the search for them, and whole steps.

The first part finds, for each absent client, the active client with the most similar mean
direction: exactly and by clusters, beside FAISS and a careful product in PyTorch. It also counts
how often a search misses. Clients are in groups; the cosine of two means of one group is 0.67.

The second part times steps of ``fdms-means`` and ``fdms`` as K grows, with K / 100 active clients.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from rich.console import Console
from torch import Tensor

import fastagg
from benchmarks import report
from benchmarks.machine import describe
from fastagg import ops
from fastagg.rules._mean_sketches import Means, Rows
from fastagg_sim.looks import LOOKS

COLUMNS = 256  # k
PARAMS = 62_006  # d, LeNet
GROUPS = (50, 1000)
SIZES = [(10_000, 1_000), (100_000, 1_000), (100_000, 10_000), (1_000_000, 10_000)]  # K, S
STEPS = [1_000, 10_000, 100_000, 1_000_000]
MOST_PAIRS = 10_000  # clients of the exact rule: its state takes 6 K^2 bytes
NEAR = 0.98  # of the best similarity: less is a miss
READ_TIMES, SEARCH_SECONDS, MOST_BYTES, GROWTH = 3.0, 1.5, 1.2e9, 12.0  # targets

Found = tuple[Tensor, Tensor]  # positions and similarities
Search = Callable[[], Found]


@dataclass(frozen=True)
class Timed:
    """One measurement. Shares are of absent clients; those of another part are empty."""

    part: str  # "search" or "step"
    what: str
    K: int
    S: int
    groups: int
    seconds: float  # median
    missed: float | None = None  # share with less than 0.98 of the best similarity
    other_group: float | None = None  # share with a friend of another group
    state_bytes: int | None = None
    reading: float | None = None  # seconds in which the step's rows are read twice


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="of each call; default: 5")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="dry run with 1000 clients")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write friends.*")


def run(options: argparse.Namespace, console: Console) -> None:
    torch.set_num_threads(options.threads)
    if _faiss() is None:
        console.print("FAISS is not installed (the extra `bench` has it): no comparison with it")
    else:
        _faiss().omp_set_num_threads(options.threads)
    sizes = [(1_000, 300)] if options.quick else SIZES
    steps = STEPS[:1] if options.quick else STEPS
    results: list[Timed] = []
    for groups in GROUPS:
        for K, S in sizes:
            console.print(f"search, {groups} groups, K = {K:,}, S = {S:,}", style="dim")
            results += searches(K, S, groups, options.repeats)
    for K in steps:
        console.print(f"steps, K = {K:,}", style="dim")
        results += timed_steps(K, options.repeats)
    text = markdown(results)
    console.print(text, markup=False)
    if options.out:
        said = (
            f"Medians of {options.repeats} repeats; of 3, or 1 for exact searches, if K S is above "
            f"2 10^9. {options.threads} threads, k = {COLUMNS}."
        )
        page = report.write_page(options.out, "friends", "Friends of many clients", said, text)
        draw(results, page.with_suffix(".png"))
        with page.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
            table, machine = csv.writer(file, lineterminator="\n"), describe()
            table.writerow([*(field.name for field in fields(Timed)), *machine])
            table.writerows([*astuple(r), *machine.values()] for r in results)


# --- the search -----------------------------------------------------------------------------------


def searches(K: int, S: int, groups: int, repeats: int) -> list[Timed]:
    """Time each way to search, in turn, and count what it misses."""
    clients = means_of(K, groups, seed=1)
    active = torch.randperm(K, generator=torch.Generator().manual_seed(2))[:S].sort().values
    absent = torch.ones(K, dtype=torch.bool).index_fill_(0, active, False).nonzero().flatten()
    rows = clients.numbers[active]
    ways = {
        "fastagg, exact": ours(clients, rows, absent, clustered=False),
        "fastagg, clusters": ours(clients, rows, absent, clustered=True),
        "torch, tiles of 4096": by_tiles(clients, rows, absent),
    }
    if _faiss() is not None:
        ways["FAISS IndexFlatIP"] = by_faiss(clients, rows, absent, probes=None)
        for probes in (4, 16):
            name = f"FAISS IndexIVFFlat, nprobe {probes}"
            ways[name] = by_faiss(clients, rows, absent, probes=probes)
    slow = len(absent) * S > 2 * 10**9
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, Found] = {}
    for _ in range(1 if slow else repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            found[name] = way()
            seconds[name].append(time.perf_counter() - start)
    for name in ("fastagg, clusters", *(name for name in ways if "IVF" in name)):
        for _ in range((3 if slow else repeats) - len(seconds[name])):
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
    similar = {name: cosines(clients.numbers, rows, absent, f[0]) for name, f in found.items()}
    best = similar["fastagg, exact"]
    return [
        Timed(
            "search", name, K, S, groups, statistics.median(seconds[name]),
            missed=float((similar[name] < NEAR * best).float().mean()),
            other_group=float((active[f[0]] % groups != absent % groups).float().mean()),
        )
        for name, f in found.items()
    ]  # fmt: skip


def means_of(size: int, groups: int, seed: int) -> Means:
    """Return means of ``size`` clients; client i is in group i % groups."""
    base = torch.randn(groups, COLUMNS, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    means = Means.zeros(size, COLUMNS, torch.device("cpu"))
    for ids in torch.arange(size).split(1 << 16):
        noise = torch.randn(len(ids), COLUMNS, generator=g)
        sketches = base[ids % groups] + 0.7 * noise
        means.put_(ids, means.renewed(ids, sketches.double(), 0.2))
    return means


def ours(clients: Means, rows: Tensor, absent: Tensor, *, clustered: bool) -> Search:
    every = torch.arange(len(rows))
    return lambda: Rows(rows, clustered).nearest(clients.numbers, absent, every)


def by_tiles(clients: Means, rows: Tensor, absent: Tensor) -> Search:
    """Products of 4096 queries at a time in float32, as a user of PyTorch would compute them."""

    def search() -> Found:
        wide = rows.float()
        unit = (wide / wide.norm(dim=1, keepdim=True)).T.contiguous()
        best = torch.empty(len(absent), dtype=torch.int64)
        similarity = torch.empty(len(absent))
        products = torch.empty(4096, len(rows))
        for begin in range(0, len(absent), 4096):
            some = clients.numbers[absent[begin : begin + 4096]].float()
            here = torch.mm(some, unit, out=products[: len(some)])
            torch.max(here, dim=1, out=(similarity[begin:][: len(some)], best[begin:][: len(some)]))
        return best, similarity

    return search


def by_faiss(clients: Means, rows: Tensor, absent: Tensor, probes: int | None) -> Search:
    """FAISS with float32 vectors. The index is timed, too, because rows change in every round."""

    faiss = _faiss()

    def search() -> Found:
        wide = rows.float()
        unit = (wide / wide.norm(dim=1, keepdim=True)).numpy()
        index: Any = faiss.IndexFlatIP(COLUMNS)
        if probes is not None:
            lists = round(len(rows) ** 0.5)
            index = faiss.IndexIVFFlat(index, COLUMNS, lists, faiss.METRIC_INNER_PRODUCT)
            index.cp.min_points_per_centroid = 1
            index.train(unit)
            index.nprobe = probes
        index.add(unit)
        best, similarity = [], []
        for some in absent.split(1 << 16):
            values, places = index.search(clients.numbers[some].float().numpy(), 1)
            best.append(torch.from_numpy(places[:, 0]))
            similarity.append(torch.from_numpy(values[:, 0]))
        return torch.cat(best), torch.cat(similarity)

    return search


def _faiss() -> Any:
    """Return the module faiss, or None if it is not installed."""
    return importlib.import_module("faiss") if importlib.util.find_spec("faiss") else None


def cosines(numbers: Tensor, rows: Tensor, absent: Tensor, found: Tensor) -> Tensor:
    """Return the cosine of each absent client and the row found for it, [Q] float32."""
    parts = []
    for some, places in zip(absent.split(1 << 16), found.split(1 << 16), strict=True):
        parts.append(torch.cosine_similarity(numbers[some].float(), rows[places].float(), dim=1))
    return torch.cat(parts)


# --- steps ----------------------------------------------------------------------------------------


def timed_steps(K: int, repeats: int) -> list[Timed]:
    """Time steps with K / 100 active clients of K, all of whom are known."""
    S, groups = K // 100, min(GROUPS[0], K // 100)
    rows = torch.randn(S, PARAMS, generator=torch.Generator().manual_seed(3))
    common = torch.randn(groups, PARAMS, generator=torch.Generator().manual_seed(4))
    for s in range(S):
        rows[s] += common[s % groups]
    rules = ["fdms-means"] + ["fdms"] * (K <= MOST_PAIRS)
    make: Any = fastagg.make
    aggs = {rule: make(rule, num_clients=K, num_params=PARAMS) for rule in rules}
    fill(aggs["fdms-means"], common, K)
    if "fdms" in aggs:
        fill_pairs(aggs["fdms"], aggs["fdms-means"])
    params, out = torch.zeros(PARAMS), torch.empty(PARAMS)
    weights = torch.full((S,), 1.0 / S, dtype=torch.float64)
    g, group = torch.Generator().manual_seed(5), torch.arange(K) % groups
    seconds: dict[str, list[float]] = {rule: [] for rule in rules}
    wrong: dict[str, float] = {}
    reading: list[float] = []
    for _ in range(repeats + 1):
        # Row s is of a client of group s % groups.
        members = torch.randperm(K // groups, generator=g)[: S // groups]
        clients = (members[:, None] * groups + torch.arange(groups)).flatten()
        start = time.perf_counter()
        for _ in range(2):
            ops.weighted_sum_(out, rows[: len(clients)], weights[: len(clients)], 0.0)
        reading.append(time.perf_counter() - start)
        for rule, agg in aggs.items():
            start = time.perf_counter()
            friends = agg.step(params, rows[: len(clients)], clients).friends
            seconds[rule].append(time.perf_counter() - start)
            assert friends is not None
            assert bool((friends >= 0).all())  # every client has a friend
            wrong[rule] = float((friends % groups != group).float().mean())
    return [
        Timed(
            "step", rule, K, S, groups, statistics.median(seconds[rule][1:]),
            other_group=wrong[rule], state_bytes=agg.memory_bytes,
            reading=statistics.median(reading[1:]),
        )
        for rule, agg in aggs.items()
    ]  # fmt: skip


def fill(agg: fastagg.Aggregator, common: Tensor, K: int) -> None:
    """Let every client have been active once, by means of sketches of rows that are not kept."""
    assert isinstance(agg, fastagg.FDMSMeans)
    groups = len(common)
    one = fastagg.FDMSMeans(num_clients=groups, num_params=PARAMS)
    one.step(torch.zeros(PARAMS), common, range(groups))
    base = one.scales[:, None] * one.means  # [groups, k], of length 1
    g, state = torch.Generator().manual_seed(6), agg.state_dict()
    means = Means(state["means"], state["scales"], state["counts"])
    for ids in torch.arange(K).split(1 << 16):
        noise = torch.randn(len(ids), COLUMNS, generator=g) / COLUMNS**0.5
        means.put_(ids, means.renewed(ids, (base[ids % groups] + noise).double(), 0.2))
    agg.load_state_dict(state)


def fill_pairs(agg: fastagg.Aggregator, means: fastagg.FDMSMeans) -> None:
    """Let every pair have been active once: the score is that of the clients' means."""
    unit = torch.nn.functional.normalize(means.means.float())
    state = agg.state_dict()
    scores = torch.mm(unit, unit.T, out=state["scores"]).add_(1.0).mul_(0.5).clamp_(0.0, 1.0)
    scores.triu_(1).add_(scores.T.clone())  # symmetric to the last bit
    state["counts"].fill_(1).fill_diagonal_(0)
    state["rounds"].fill_(1)
    agg.load_state_dict(state)


# --- output ---------------------------------------------------------------------------------------


def markdown(results: Sequence[Timed]) -> str:
    lines = [
        f"A miss is a friend with less than {NEAR} of the best cosine. With 1000 groups and 1000 "
        "active clients, many groups have no active client; exact searches show how many.",
        "",
        "| groups | K | S | search | seconds | missed | other group |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        if r.part == "search":
            lines.append(
                f"| {r.groups} | {r.K:,} | {r.S:,} | {r.what} | {r.seconds:.3g} "
                f"| {r.missed:.3%} | {r.other_group:.3%} |"
            )
    lines += [
        "",
        f"Steps with d = {PARAMS:,}. At the beginning every client has a mean, and under `fdms` "
        "every pair has the score of its two means. So every absent client has a friend.",
        "",
        "| K | S | rule | state, MB | seconds | reading the rows twice | other group |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    steps = [r for r in results if r.part == "step"]
    for r in steps:
        assert r.state_bytes is not None and r.reading is not None
        lines.append(
            f"| {r.K:,} | {r.S:,} | `{r.what}` | {r.state_bytes / 1e6:.4g} | {r.seconds:.3g} "
            f"| {r.reading:.3g} | {r.other_group:.3%} |"
        )
    return "\n".join([*lines, "", *targets(steps)])


def targets(steps: Sequence[Timed]) -> list[str]:
    """Return one line for each target that the results can judge."""
    means = {r.K: r for r in steps if r.what == "fdms-means"}
    pairs = {r.K: r for r in steps if r.what == "fdms"}
    lines = []
    most, before = means.get(10**6), means.get(10**5)
    if most is not None and before is not None:
        assert most.reading is not None and most.state_bytes is not None
        limit = READ_TIMES * most.reading + SEARCH_SECONDS
        growth = most.seconds / before.seconds
        lines = [
            f"- K = 10^6: {most.seconds:.3g} s; target: at most {READ_TIMES:g} times the reading "
            f"and {SEARCH_SECONDS:g} s, {limit:.3g} s: {_verdict(most.seconds <= limit)}.",
            f"- K = 10^6: {most.state_bytes / 1e9:.3g} GB of state; target: at most "
            f"{MOST_BYTES / 1e9:g} GB: {_verdict(most.state_bytes <= MOST_BYTES)}.",
            f"- From K = 10^5 to 10^6 the time grows {growth:.3g} times; target: at most "
            f"{GROWTH:g}: {_verdict(growth <= GROWTH)}.",
        ]
    if MOST_PAIRS in pairs and MOST_PAIRS in means:
        ratio = pairs[MOST_PAIRS].seconds / means[MOST_PAIRS].seconds
        others = [found[MOST_PAIRS].other_group for found in (pairs, means)]
        lines += [
            f"- K = 10^4: {ratio:.3g} times as fast as `fdms`; target: faster: "
            f"{_verdict(ratio > 1)}.",
            "- K = 10^4: friends are of the same groups as those of `fdms`, the clients' own; "
            f"target: all: {_verdict(others == [0.0, 0.0])}.",
        ]
    return lines


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def draw(results: Sequence[Timed], target: Path) -> Path:
    """Draw time and state against K, both axes logarithmic."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.6), layout="constrained")
    steps = [r for r in results if r.part == "step"]
    for rule in ("fdms", "fdms-means"):
        mine, look = [r for r in steps if r.what == rule], LOOKS[rule]
        style = {"color": look.color, "marker": look.marker, "linestyle": look.style, "label": rule}
        K = [r.K for r in mine]
        left.plot(K, [r.seconds for r in mine], **style)
        right.plot(K, [(r.state_bytes or 0) / 1e6 for r in mine], **style)
    means = [r for r in steps if r.what == "fdms-means"]
    left.plot(
        [r.K for r in means], [r.reading for r in means], color="grey", linestyle=":",
        label="reading the rows twice",
    )  # fmt: skip
    left.set(ylabel="seconds a step", title=f"S = K / 100, d = {PARAMS:,}")
    right.set(ylabel="state, MB", title=f"k = {COLUMNS}")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="clients K")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=150)
    plt.close(figure)
    return target
