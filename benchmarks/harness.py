# SPDX-License-Identifier: Apache-2.0
"""The timing of contenders.

All contenders of a comparison run in one process, in turn (A B C, B C A, C A B, ...), and fastagg
beside the ceilings, so that a drift of the machine's speed affects all of them equally. A ratio is
the median of the ratios within each turn, from which such a drift is gone. Operands, outputs
and scratch memory are allocated and touched before. Between two contenders the process sleeps until
the idle threads of the previous library have stopped spinning, which its CPU time shows. The
calling thread has its own core, so that no two threads start on the same core
(``machine.threads_apart``). After a sleep, a core of a virtual machine is slow for about a
millisecond, so untimed calls come first, of contenders and ceilings alike; not of a contender whose
call is so long that it makes no difference. Short calls are timed in batches.

A ratio is refused (NaN) if it would be meaningless:

* "busy": other processes used more than ``machine.BUSY`` of the cores, or multiply-adds were slower
  than ``SLOWED`` times the fastest of the run. The latter detects a virtual machine whose cores are
  used by others, which it cannot see otherwise.
* "noisy": the 95 % interval of the median of the turns' ratios is wider than ``NOISY`` of it.

A disturbed comparison is measured again, at most twice: on a busy machine anew, otherwise with more
turns beside the first ones.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fastagg
from benchmarks.ceilings import (
    Probe,
    fma_probe,
    read_probe,
    update_beside_probe,
    update_probe,
)
from benchmarks.intervals import interval
from benchmarks.machine import Watch, home_of, peak_bytes, threads_apart
from benchmarks.work import WORK, Work

SHAKY = 0.10
"""Interquartile range over median above which a time is marked with ``~``."""
NOISY = 0.25
"""Width of the 95 % interval of a median ratio, over the ratio, above which it is refused."""

SLOWED = 0.8
"""Fraction of the fastest multiply-adds of a run below which the machine counts as "busy"."""

_BATCH_SECONDS = 2e-3  # a timed batch of calls lasts at least this long
_MAX_BATCH = 200
_WARM_SECONDS = 2e-3  # of untimed calls before a batch
_LONG_SECONDS = 20e-3  # of a call that needs no untimed one before it
_PATIENCE = 15.0  # seconds after which a disturbed comparison is not measured again
_SPINNING = 1.0  # seconds after which threads that still spin are not waited for
_LOOK = 5e-3  # seconds over which the CPU time of the process is compared
_ROLES = ("ours", "variant", "careful", "compiled", "naive", "peer")


@dataclass(frozen=True)
class Contender:
    """One implementation in a comparison.

    Attributes:
        name: name in the tables.
        call: runs the implementation once and returns its result.
        role: "ours": fastagg, exactly one per comparison. "variant": another way to use fastagg.
            "careful": an optimised implementation that allocates nothing large; the fastest of
            these is the baseline. "compiled": torch.compile. "naive": the straightforward
            implementation. "peer": another framework.
        isa: the instruction set, if it is not the best of the machine.
        repeats: maximum number of repeats, for implementations that take many seconds and are far
            slower than the others.
    """

    name: str
    call: Callable[[], object]
    role: str = "careful"
    isa: str | None = None
    repeats: int | None = None

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ValueError(f"role: expected one of {_ROLES}, got {self.role!r}")


@dataclass(frozen=True)
class Comparison:
    """Contenders that compute the same, and the operands on which the ceilings are measured.

    ``operands`` is (x,) for ops that read, (c, u) for ops that update c in place, and (to, c, u)
    for steps that write what becomes of c into other rows. All are contiguous float32. Measuring
    the ceilings changes c or to, but not its magnitude.
    """

    op: str
    S: int
    d: int
    contenders: Sequence[Contender]
    operands: tuple[Tensor, ...]
    K: int | None = None

    @property
    def work(self) -> Work:
        return WORK[self.op](self.S, self.d)


@dataclass(frozen=True)
class Row:
    """A row of the tables and of the CSV file. Refused rates and ratios are NaN."""

    op: str
    K: int | None
    S: int
    d: int
    threads: int
    contender: str
    role: str
    isa: str
    us: float  # median of `repeats`
    us_q1: float
    us_q3: float
    gbytes_per_s: float  # by the formulas of work.py
    gflops: float
    bound: str  # the ceiling that determines the floor: "fma", or the name of the other probe
    percent_of_ceiling: float  # floor / us; this and the next two are medians over the turns
    baseline: str  # the fastest careful contender
    times_baseline: float  # us of the baseline / us
    times_ours: float  # us / us of fastagg
    peak_mb: float  # additional memory that the call used at its peak
    home: str  # where the operands are between calls: "cache" or "DRAM"
    read_gbytes_per_s: float  # the ceilings, measured in turn with the contenders
    update_gbytes_per_s: float  # in place or beside
    fma_gflops: float
    repeats: int
    other_cores: float  # cores used by other processes during the comparison
    verdict: str  # "ok", "shaky" (marked with ~); "noisy" (to the ceiling) or "busy" (no ratios)


@dataclass(frozen=True)
class Samples:
    """Raw results of a comparison: times and peak bytes by contender, rates by probe.

    The times are those of all turns, NaN in turns without this contender.
    """

    seconds: dict[str, list[float]]
    rates: dict[str, list[float]]
    peaks: dict[str, float]
    other_cores: float
    busy: bool

    def joined(self, other: Samples) -> Samples:
        """Return the turns of both; these alone if the other ones were disturbed by processes."""
        if other.busy:
            return self
        return Samples(
            {name: [*times, *other.seconds[name]] for name, times in self.seconds.items()},
            {name: [*rates, *other.rates[name]] for name, rates in self.rates.items()},
            {name: max(peak, other.peaks[name]) for name, peak in self.peaks.items()},
            max(self.other_cores, other.other_cores),
            False,
        )


def compare(
    comparison: Comparison, *, repeats: int, settle: float = 0.03, attempts: int = 3
) -> list[Row]:
    """Measure one comparison and return a row for each contender.

    Args:
        comparison: what to measure.
        repeats: timed batches of each contender.
        settle: seconds of sleep before each batch.
        attempts: maximum number of measurements, if the result is disturbed.
    """
    best = str(fastagg.build_info()["isa"])
    isas = {best, *(c.isa for c in comparison.contenders if c.isa)}
    probes = [_bandwidth_probe(comparison, best), *(fma_probe(isa) for isa in sorted(isas))]
    start = time.perf_counter()
    samples: Samples | None = None
    for attempt in range(attempts):
        if attempt:
            time.sleep(2.0)
        found = sample(comparison.contenders, probes, repeats, settle)
        samples = found if samples is None or samples.busy else samples.joined(found)
        rows = rows_of(comparison, samples, best)
        if undisturbed(rows) or time.perf_counter() - start > _PATIENCE:
            break
    return rows


def _bandwidth_probe(comparison: Comparison, isa: str) -> Probe:
    operands = comparison.operands
    if comparison.work.pattern == "read":
        return read_probe(operands[0], isa)
    if len(operands) == 2:
        return update_probe(*operands, isa)
    to, c, u = operands
    return update_beside_probe(to, c, u, isa)


def slowed(comparisons: Sequence[Sequence[Row]]) -> list[bool]:
    """Of each comparison of a run, whether the machine was slower than in the others."""

    def rate(row: Row) -> tuple[tuple[str, int], float]:
        return (row.isa or str(fastagg.build_info()["isa"]), row.threads), row.fma_gflops

    best: dict[tuple[str, int], float] = {}
    for key, found in (rate(row) for rows in comparisons for row in rows):
        best[key] = max(found, best.get(key, 0.0))
    return [
        any(found < SLOWED * best[key] for key, found in map(rate, rows)) for rows in comparisons
    ]


def refused(row: Row) -> Row:
    """The row without ratios."""
    return replace(
        row,
        verdict="busy",
        percent_of_ceiling=math.nan,
        times_baseline=math.nan,
        times_ours=math.nan,
    )


def undisturbed(rows: Sequence[Row]) -> bool:
    """Whether fastagg has its two figures; the rest is not worth the time."""
    (ours,) = (row for row in rows if row.role == "ours")
    figures = [ours.percent_of_ceiling, *([ours.times_baseline] if ours.baseline else [])]
    return not any(map(math.isnan, figures))


def sample(
    contenders: Sequence[Contender], probes: Sequence[Probe], repeats: int, settle: float
) -> Samples:
    """Time all contenders and probes in turn."""
    batches, peaks, long = {}, {}, set()
    for contender in contenders:
        contender.call()  # compiles, starts threads, touches memory
        start = time.perf_counter()
        peaks[contender.name] = peak_bytes(contender.call)
        if time.perf_counter() - start < 20 * _BATCH_SECONDS:  # peak_bytes takes milliseconds
            start = time.perf_counter()
            contender.call()
        taken = max(time.perf_counter() - start, 1e-9)
        batches[contender.name] = min(_MAX_BATCH, math.ceil(_BATCH_SECONDS / taken))
        if taken > _LONG_SECONDS:
            long.add(contender.name)
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    rates: dict[str, list[float]] = {probe.name: [] for probe in probes}
    gc.collect()
    gc.disable()
    try:
        with threads_apart(), Watch() as watch:
            for repeat in range(repeats):
                first = repeat % len(contenders)
                for contender in (*contenders[first:], *contenders[:first]):
                    if contender.repeats is not None and repeat >= contender.repeats:
                        seconds[contender.name].append(math.nan)
                        continue
                    wait_out_threads(settle)
                    if contender.name not in long:
                        warm_up(contender.call)
                    seconds[contender.name].append(_timed(contender, batches[contender.name]))
                    if contender.role == "ours":
                        wait_out_threads(settle)
                        for probe in probes:
                            warm_up(probe.rate)
                            rates[probe.name].append(probe.rate())
    finally:
        gc.enable()
    return Samples(seconds, rates, peaks, watch.others, watch.busy)


def wait_out_threads(settle: float) -> None:
    """Sleep for ``settle`` seconds, and then until no thread of this process computes.

    Idle threads of some BLAS libraries spin for 0.1 s after a call, on cores that the next
    contender needs. Gives up after ``_SPINNING`` seconds.
    """
    time.sleep(settle)
    end = time.perf_counter() + _SPINNING
    while settle and time.perf_counter() < end:
        before = time.process_time()
        time.sleep(_LOOK)
        if time.process_time() - before < 0.1 * _LOOK:
            return


def warm_up(call: Callable[[], object]) -> None:
    """Call at least once, and until ``_WARM_SECONDS`` have passed, to wake cores and threads."""
    end = time.perf_counter() + _WARM_SECONDS
    call()
    while time.perf_counter() < end:
        call()


def _timed(contender: Contender, batch: int) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    for _ in range(batch):
        contender.call()
    return (time.perf_counter() - start) / batch


def rows_of(comparison: Comparison, samples: Samples, best_isa: str) -> list[Row]:
    """Compute medians and ratios; ratios that are refused are NaN."""
    work = comparison.work
    measured = {
        name: [taken for taken in times if not math.isnan(taken)]
        for name, times in samples.seconds.items()
    }
    median = {name: statistics.median(times) for name, times in measured.items()}
    quartiles = {name: statistics.quantiles(t, n=4) for name, t in measured.items()}
    rate = {name: statistics.median(rates) for name, rates in samples.rates.items()}
    bandwidth = next(name for name in rate if not name.startswith("fma "))
    ours = next(c.name for c in comparison.contenders if c.role == "ours")
    careful = [c.name for c in comparison.contenders if c.role == "careful"]
    baseline = min(careful, key=median.__getitem__, default="")

    def ratio(above: str, below: str) -> float:
        if not above or samples.busy:
            return math.nan
        return paired(samples.seconds[above], samples.seconds[below])

    rows = []
    for contender in comparison.contenders:
        name = contender.name
        isa = contender.isa or best_isa
        floor = work.floor(rate[bandwidth], rate[f"fma {isa}"])
        fma_bound = work.flops / rate[f"fma {isa}"] >= floor
        turns = zip(samples.rates[bandwidth], samples.rates[f"fma {isa}"], strict=True)
        share = paired([work.floor(*found) for found in turns], samples.seconds[name])
        rows.append(
            Row(
                op=comparison.op,
                K=comparison.K,
                S=comparison.S,
                d=comparison.d,
                threads=torch.get_num_threads(),
                contender=name,
                role=contender.role,
                isa=isa if contender.role in ("ours", "variant") else "",
                us=median[name] * 1e6,
                us_q1=quartiles[name][0] * 1e6,
                us_q3=quartiles[name][2] * 1e6,
                gbytes_per_s=work.num_bytes / median[name] * 1e-9,
                gflops=work.flops / median[name] * 1e-9,
                bound="fma" if fma_bound else bandwidth,
                percent_of_ceiling=math.nan if samples.busy else 100 * share,
                baseline=baseline,
                times_baseline=ratio(baseline, name),
                times_ours=ratio(name, ours),
                peak_mb=samples.peaks[name] * 1e-6,
                home=home_of(sum(t.nbytes for t in comparison.operands)),
                read_gbytes_per_s=rate.get("read", math.nan) * 1e-9,
                update_gbytes_per_s=math.nan if bandwidth == "read" else rate[bandwidth] * 1e-9,
                fma_gflops=rate[f"fma {isa}"] * 1e-9,
                repeats=len(measured[name]),
                other_cores=samples.other_cores,
                verdict=_verdict(samples.busy, share, spread(measured[name])),
            )
        )
    return rows


def _verdict(busy: bool, share: float, spread: float) -> str:
    if busy:
        return "busy"
    return "noisy" if math.isnan(share) else "shaky" if spread > SHAKY else "ok"


def paired(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios within each turn, NaN if it is noisy.

    Turns without one of the two (NaN) do not count. Fewer than six ratios have no interval of 95 %;
    their range is taken.
    """
    ratios = [a / b for a, b in zip(above, below, strict=True) if not math.isnan(a / b)]
    low, high = interval(ratios) if len(ratios) > 5 else (min(ratios), max(ratios))
    median = statistics.median(ratios)
    return median if high - low <= NOISY * median else math.nan


def spread(times: Sequence[float]) -> float:
    """Return the interquartile range of `times`, divided by their median."""
    q1, q2, q3 = statistics.quantiles(times, n=4)
    return (q3 - q1) / q2
