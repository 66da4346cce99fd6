# SPDX-License-Identifier: Apache-2.0
"""Performance targets of the CPU kernels, and whether a run met them.

A target applies to one op at one or more shapes. ``against`` is what fastagg is compared with: the
beginning of a contender's name, a role ("careful", which means the fastest of them, or "compiled"),
or one of

* "ceiling": the minimum percentage of the ceiling that bandwidth and multiply-adds allow,
* "seconds": the maximum time,
* "S x d": the maximum peak memory, relative to the 4 S d bytes of the rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness import Row

HEADINGS = ("op", "S", "d", "by", "against", "asked", "at most", "measured", "verdict")
LEGEND = "At most: the ratio that fastagg would have at the ceiling."
_AT_MOST = ("seconds", "S x d")


@dataclass(frozen=True)
class Target:
    op: str
    shapes: tuple[tuple[int, int], ...]
    against: str
    asked: float
    by: str = "fastagg"

    def figure(self, value: float | None) -> str:
        """Return a value in the unit of the target, or "-" if there is none."""
        if value is None or math.isnan(value):
            return "-"
        if self.against == "ceiling":
            return f"{value:.0f} %"
        if self.against == "seconds":
            return f"{value:.3g} s"
        return f"{value:.2g}" if self.against == "S x d" else f"{value:.2f} x"


def _gram(against: str, asked: float, *shapes: tuple[int, int]) -> Target:
    return Target("gram", shapes, against, asked)


M = 1_000_000
_SMALL = ((20, 62_006), (20, M), (20, 10 * M))
_LARGE = ((64, M), (100, M), (256, M), (512, M // 2), (1024, M // 4))
_ROWS = ((20, M), (100, M), (256, 400_000))
_VECTORS = ((1, 62_006), (1, M), (1, 10 * M))
_STEPS = ((20, M), (100, M), (500, 200_000))
_ROBUST = ((100, M), (500, 200_000))
_COLUMNS = ((10, M), (20, M), (100, M), (500, 200_000), (1000, 100_000))
_SOME_COLUMNS = ((20, M), (100, M), (1000, 100_000))
_GROUPS = ((1000, 100_000),)
_CLIENTS = ((5000, 10_000),)

TARGETS = [
    _gram("torch X @ X.T", 3.6, *_SMALL, *_LARGE),
    _gram("careful", 3.5, *_SMALL, (64, M)),
    _gram("careful", 2.7, (100, M)),
    _gram("careful", 2.4, (256, M), (512, M // 2)),
    _gram("careful", 2.1, (1024, M // 4)),
    _gram("ceiling", 75, *_SMALL),
    _gram("ceiling", 80, (64, M), (100, M), (256, M)),
    _gram("ceiling", 84, (512, M // 2), (1024, M // 4)),
    Target("gram", ((20, M), (64, M), (256, M)), "torch X @ X.T", 2.0, by="fastagg, AVX2"),
    Target("gram of a list", ((100, M),), "torch.stack", 8.0),
    Target("gram of groups", _GROUPS, "fastagg, dense", 7.0),
    Target("gram of all pairs", _GROUPS, "fastagg, dense", 1 / 1.03),
    Target("weighted_sum_", _ROWS, "torch.addmv", 1.5),
    Target("weighted_sum_", _ROWS[1:], "ceiling", 95),
    Target("sketch_", ((100, M), (1000, 100_000)), "ceiling", 85),
    Target("add_adaptive_", _VECTORS, "torch.optim.Adam, fused", 1.0),
    Target("add_adaptive_", _VECTORS, "torch.optim.Adam, foreach", 1.5),
    Target("mimic_", _ROWS, "careful", 2.1),
    Target("mimic_", _ROWS, "compiled", 1.8),
    Target("memory_update_", _ROWS, "careful", 2.5),
    Target("memory_update_", _ROWS, "compiled", 1.7),
    *(Target(op, _CLIENTS, "seconds", 0.3) for op in ("select_friends", "eliminate_")),
    Target("update_scores_", _CLIENTS, "seconds", 0.3),
    Target("step fedavg", _STEPS, "torch.addmv", 1.0),
    Target("step fedavg", ((100, M),), "ceiling", 90),
    *(Target(f"step {rule}", _STEPS, "careful", 1.3) for rule in ("mifa", "stale", "fedvarp")),
    *(Target(f"step {rule}", _STEPS, "careful", 1.5) for rule in ("mimic", "mimic-aged")),
    *(
        Target(f"step {rule}", _STEPS[1:], "ceiling", 80)
        for rule in ("mifa", "stale", "fedvarp", "mimic", "mimic-aged")
    ),
    Target("step fdms", _STEPS, "careful", 3.0),
    Target("step fdms, sketch", ((100, M),), "fastagg, exact", 2.0),
    Target("step fdms, sketch", ((1000, M),), "fastagg, exact", 15.0),
    *(Target("columns median", _COLUMNS, f"torch.{name}", 5.0) for name in ("median", "sort")),
    Target("columns median", _COLUMNS, "ByzFL", 10.0),
    *(
        Target(f"columns {name}", _SOME_COLUMNS, against, asked)
        for name in ("trimmed-mean", "meamed")
        for against, asked in (("torch.sort", 5.0), ("ByzFL", 10.0))
    ),
    Target("step geometric-median", _ROBUST, "ByzFL GeometricMedian, T = 8", 10.0),
    Target("step multi-krum", _ROBUST, "ByzFL", 10.0),
    Target("step multi-krum", _ROBUST, "Flower", 10.0),
    Target("step nnm", ((20, M),), "ByzFL", 10.0),
    *(
        Target(f"step {rule}", _ROBUST, "S x d", 0.25)
        for rule in ("geometric-median", "multi-krum", "nnm")
    ),
]


@dataclass(frozen=True)
class Judged:
    """A target at one of its shapes, and what a run measured.

    The verdict is "met" or "missed". If there is none it is the reason: "busy", "noisy", or
    "absent" for a contender that is not installed.
    """

    target: Target
    own: Row
    at_most: float | None  # the ratio that fastagg would have at the ceiling
    measured: float | None
    verdict: str

    @property
    def out_of_reach(self) -> bool:
        """Whether the target is missed, and would be missed at the ceiling as well."""
        at_most = math.nan if self.at_most is None else self.at_most
        return self.verdict == "missed" and at_most < self.target.asked

    def line(self) -> tuple[str, ...]:
        """Return the texts for HEADINGS."""
        target, own = self.target, self.own
        return (
            target.op, str(own.S), f"{own.d:,}", target.by, _whom(target, own),
            target.figure(target.asked), target.figure(self.at_most), target.figure(self.measured),
            self.verdict,
        )  # fmt: skip


def judge(rows: Iterable[Row]) -> list[Judged]:
    """Judge each target at each of its measured shapes."""
    comparisons: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        comparisons.setdefault((row.op, row.S, row.d), []).append(row)
    found = []
    for target, shape in ((t, shape) for t in TARGETS for shape in t.shapes):
        compared = comparisons.get((target.op, *shape), [])
        own = next((row for row in compared if row.contender == target.by), None)
        if own is not None:
            measured, at_most = (f(target, own, compared) for f in (_measure, _at_ceiling))
            verdict = _verdict(target, own, measured)
            found.append(Judged(target, own, at_most, measured, verdict))
    return found


def verdicts(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Return a line for each target at each of its measured shapes, in the order of HEADINGS."""
    return [judged.line() for judged in judge(rows)]


def _others(target: Target, found: Sequence[Row]) -> list[Row]:
    return [
        row
        for row in found
        if row.role == target.against or row.contender.startswith(target.against)
    ]


def _measure(target: Target, own: Row, found: Sequence[Row]) -> float | None:
    """Return the measured value; NaN if it is refused, None if there is no such contender."""
    if target.against == "ceiling":
        return own.percent_of_ceiling
    if target.against == "seconds":
        return math.nan if own.verdict in ("busy", "noisy") else own.us * 1e-6
    if target.against == "S x d":
        return own.peak_mb * 1e6 / (4 * own.S * own.d)
    if target.against == "careful":
        return own.times_baseline
    ratios = [other.times_ours / own.times_ours for other in _others(target, found)]
    return min(ratios, default=None)


def _at_ceiling(target: Target, own: Row, found: Sequence[Row]) -> float | None:
    """Return the ratio that fastagg would have at the ceiling; None if no ratio is asked."""
    if target.against in ("ceiling", *_AT_MOST):
        return None
    others = _others(target, found)
    if target.against == "careful":
        others = [row for row in found if row.contender == own.baseline]
    return min((100.0 / row.percent_of_ceiling for row in others), default=None)


def _whom(target: Target, own: Row) -> str:
    return f"fastest careful: {own.baseline}" if target.against == "careful" else target.against


def _verdict(target: Target, own: Row, measured: float | None) -> str:
    if measured is None:
        return "absent"
    if math.isnan(measured):
        return "busy" if own.verdict == "busy" else "noisy"
    met = measured <= target.asked if target.against in _AT_MOST else measured >= target.asked
    return "met" if met else "missed"


def summary(lines: Sequence[tuple[str, ...]]) -> str:
    """Return the number of lines of each verdict, as text."""
    counts = Counter(line[-1] for line in lines)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "none measured"
