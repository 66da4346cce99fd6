# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks measure: ratios reported or withheld, targets, the machine."""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fastagg
from benchmarks import __main__ as entry
from benchmarks import (
    ceilings,
    columns,
    harness,
    machine,
    memory_ops,
    operands,
    ops,
    options,
    report,
    steps,
    targets,
)
from benchmarks.harness import (
    NOISY,
    SHAKY,
    Comparison,
    Contender,
    Row,
    Samples,
    compare,
    paired,
    refused,
    rows_of,
    slowed,
    spread,
)
from benchmarks.options import Options

# --- rows of a table, with and without a ratio -------------------------------------------------


def comparison() -> Comparison:
    contenders = [
        Contender("fastagg", lambda: None, "ours"),
        Contender("slow", lambda: None),
        Contender("careful", lambda: None),
        Contender("naive", lambda: None, "naive"),
    ]
    return Comparison("gram", 3, 1000, contenders, (torch.zeros(3, 1000),))


def samples(busy: bool = False, **seconds: list[float]) -> Samples:
    times = {
        "fastagg": [1e-6] * 9, "slow": [4e-6] * 9, "careful": [2e-6] * 9, "naive": [8e-6] * 9,
    } | seconds  # fmt: skip
    rates = {"read": [12e9, 24e9, 48e9] * 3, "fma avx2": [12e9] * 9}
    return Samples(times, rates, dict.fromkeys(times, 5e6), 1.5 if busy else 0.0, busy)


def test_a_quiet_comparison_gives_all_figures() -> None:
    ours, slow, careful, naive = rows_of(comparison(), samples(), "avx2")
    assert (ours.us, ours.times_baseline, ours.times_ours) == (1.0, 2.0, 1.0)
    assert {row.baseline for row in (ours, slow, naive)} == {"careful"}
    assert (slow.times_ours, slow.times_baseline) == (4.0, 0.5)
    assert (careful.times_baseline, naive.times_ours) == (1.0, 8.0)
    # 12,000 bytes at 24 GB/s are 0.5 us; 12,000 flops at 12 GFLOP/s are 1 us: that is the floor.
    assert (ours.bound, ours.percent_of_ceiling) == ("fma", pytest.approx(100.0))
    assert slow.percent_of_ceiling == pytest.approx(25.0)
    assert ours.gbytes_per_s == pytest.approx(12.0)
    assert (ours.peak_mb, ours.home, ours.verdict) == (5.0, "cache", "ok")


def test_no_ratio_on_a_busy_machine() -> None:
    for row in rows_of(comparison(), samples(busy=True), "avx2"):
        assert row.verdict == "busy"
        assert all(
            math.isnan(value)
            for value in (row.times_baseline, row.times_ours, row.percent_of_ceiling)
        )
        assert row.us > 0
        assert "busy" in report.cells(row)


def test_no_ratio_with_a_noisy_side() -> None:
    noisy = [1e-6 * (1 + i / 8) for i in range(9)]
    assert spread(noisy) > NOISY
    ours, slow, careful, naive = rows_of(comparison(), samples(slow=noisy), "avx2")
    assert slow.verdict == "noisy"
    assert math.isnan(slow.times_ours)
    assert (careful.verdict, careful.times_ours, naive.times_ours) == ("ok", 2.0, 8.0)
    # The noisy one is now the fastest careful way, so there is no ratio to the baseline.
    assert math.isnan(ours.times_baseline)
    ours, *others = rows_of(comparison(), samples(fastagg=noisy), "avx2")
    assert all(math.isnan(row.times_ours) for row in others) and ours.verdict == "noisy"


def test_a_change_of_the_machine_s_speed_is_not_in_ratios() -> None:
    slower = [1 + i / 4 for i in range(9)]  # three times as slow in the end
    drifted = samples(**{name: [t * s for t, s in zip(times, slower, strict=True)]
                         for name, times in samples().seconds.items()})  # fmt: skip
    rates = {name: [12e9 / s for s in slower] for name in ("read", "fma avx2")}
    ours, _, careful, naive = rows_of(comparison(), replace(drifted, rates=rates), "avx2")
    assert spread(drifted.seconds["fastagg"]) > NOISY
    assert (ours.us, ours.verdict) == (2.0, "shaky")
    assert ours.times_baseline == careful.times_ours == pytest.approx(2.0)
    assert naive.times_ours == pytest.approx(8.0)
    assert ours.percent_of_ceiling == pytest.approx(100.0)


def test_ratios_are_of_the_same_turn() -> None:
    # In every turn it is twice as slow as in the one before, and half as fast as the other.
    assert paired([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]) == 2.0
    assert paired([1.0, 1.0, 1.0, 9.0], [2.0, 2.0, 2.0, math.nan]) == 0.5  # without the last turn
    assert math.isnan(paired([1.0, 2.0, 4.0], [1.0, 1.0, 1.0]))


def test_more_turns_make_a_noisy_ratio_known() -> None:
    noisy = [1.0, 1.1, 1.2, 1.3, 0.9, 0.8, 0.7]
    assert math.isnan(paired(noisy, [1.0] * 7))
    assert paired(noisy * 5, [1.0] * 35) == 1.0


def test_turns_are_joined_with_their_counterparts() -> None:
    few = {"fastagg": [1e-6] * 3, "slow": [4e-6, 4e-6, math.nan]}
    more = {"fastagg": [2e-6] * 3, "slow": [8e-6, 8e-6, math.nan]}
    rates = {"read": [1e9] * 3}
    one, two = (Samples(s, rates, {"fastagg": 1.0, "slow": 2.0}, 0.0, False) for s in (few, more))
    both = one.joined(two)
    assert both.seconds["fastagg"] == [1e-6] * 3 + [2e-6] * 3
    assert paired(both.seconds["slow"], both.seconds["fastagg"]) == pytest.approx(4.0)
    assert len(both.rates["read"]) == 6
    assert one.joined(replace(two, busy=True)) is one


def test_no_ratio_when_the_machine_was_slower_than_in_the_rest_of_a_run() -> None:
    rows = rows_of(comparison(), samples(), "avx2")
    slower = [replace(row, fma_gflops=0.7 * row.fma_gflops) for row in rows]
    other_threads = [replace(row, threads=row.threads + 1) for row in slower]
    assert slowed([rows, slower, rows]) == [False, True, False]
    assert slowed([rows, other_threads]) == [False, False]
    for row in map(refused, slower):
        assert row.verdict == "busy" and row.us > 0
        assert math.isnan(row.times_baseline) and math.isnan(row.percent_of_ceiling)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinities on this system")
def test_threads_are_kept_apart_while_timing() -> None:
    before = os.sched_getaffinity(0)
    waiting = threading.Event()
    other = threading.Thread(target=waiting.wait)
    other.start()
    try:
        with machine.threads_apart():
            own, others = os.sched_getaffinity(0), os.sched_getaffinity(other.native_id)
        assert len(own) == 1
        assert len(before) == 1 or not own & others
        assert os.sched_getaffinity(0) == before == os.sched_getaffinity(other.native_id)
    finally:
        waiting.set()
        other.join()


def test_wide_quartiles_are_marked() -> None:
    shaky = [2e-6 * (1 + i / 40) for i in range(9)]
    assert SHAKY < spread(shaky) <= NOISY
    careful = rows_of(comparison(), samples(careful=shaky), "avx2")[2]
    assert careful.verdict == "shaky"
    assert report.cells(careful)[6] == "2~"
    assert careful.times_ours == pytest.approx(2.2)


def test_the_headline_is_the_worst_and_the_geometric_mean() -> None:
    second = rows_of(comparison(), samples(slow=[9e-6] * 9), "avx2")
    other_shape = [Row(**{**row.__dict__, "d": 2000}) for row in second]
    rows = [*rows_of(comparison(), samples(), "avx2"), *other_shape]
    lines = {line[2]: line[3:] for line in report.headline(rows)}
    assert lines["slow"] == ("2", "4.00 x", "6.00 x")
    assert lines["the ceiling"] == ("2", "100 %", "100 %")
    rows += [Row(**{**r.__dict__, "d": 3000}) for r in rows_of(comparison(), samples(True), "avx2")]
    assert {line[2]: line[3:] for line in report.headline(rows)}["slow"][0] == "2 of 3"


def test_targets_are_reported_as_met_or_missed() -> None:
    rows = rows_of(comparison(), samples(), "avx2")

    def line(*target: object) -> tuple[str, ...]:
        chosen = targets.Target("gram", ((3, 1000), (4, 1000)), *target)  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(targets, "TARGETS", [chosen])
            (only,) = targets.verdicts(rows)  # (4, 1000) was not measured
        return only

    assert line("careful", 2.0)[4:] == (
        *("fastest careful: careful", "2.00 x"),
        *("2.00 x", "2.00 x", "met"),  # the ceiling is at fastagg's time
    )
    assert line("careful", 2.1)[-1] == "missed"
    assert line("slow", 4.1)[-3:] == ("4.00 x", "4.00 x", "missed")
    assert line("naive", 8.0)[-1] == "met"  # by role
    assert line("ceiling", 101)[-3:] == ("-", "100 %", "missed")
    assert line("seconds", 2e-6)[-2:] == ("1e-06 s", "met")
    assert line("seconds", 5e-7)[-1] == "missed"
    assert line("S x d", 400.0)[-2:] == ("4.2e+02", "missed")  # 5 MB over 12,000 bytes
    assert line("ByzFL", 10.0)[-3:] == ("-", "-", "absent")
    rows = [replace(row, percent_of_ceiling=row.percent_of_ceiling / 2) for row in rows]
    assert line("careful", 4.0)[-3:] == ("4.00 x", "2.00 x", "missed")
    rows = rows_of(comparison(), samples(busy=True), "avx2")
    assert line("careful", 1.0)[-3:] == ("-", "-", "busy")
    assert line("seconds", 1.0)[-1] == "busy"
    assert targets.summary([("a", "met"), ("b", "met"), ("c", "busy")]) == "2 met, 1 busy"


def test_every_target_refers_to_a_measurement() -> None:
    options = Options(threads=2, repeats=9, quick=False, only="")
    cases = (*ops.cases(options), *steps.cases(options), *columns.cases(options))
    measured = {(case.op, case.S, case.d) for case in cases}
    asked = {(target.op, *shape) for target in targets.TARGETS for shape in target.shapes}
    assert asked <= measured


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_a_disturbed_comparison_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[bool] = []

    def disturbed_once(*_: object) -> Samples:
        rounds.append(len(rounds) == 0)
        times = {c.name: [1e-6] * 9 for c in comparison().contenders}
        rates = {"read": [1e9] * 9, f"fma {ops._C.isa()}": [1e9] * 9}
        return Samples(times, rates, dict.fromkeys(times, 0.0), 0.0, rounds[-1])

    monkeypatch.setattr("benchmarks.harness.sample", disturbed_once)
    monkeypatch.setattr("benchmarks.harness.time.sleep", lambda seconds: None)
    rows = compare(comparison(), repeats=9)
    assert rounds == [True, False]
    assert {row.verdict for row in rows} == {"ok"}


# --- the machine -------------------------------------------------------------------------------


@pytest.mark.parametrize(("others", "busy"), [(0.0, False), (0.04, False), (0.06, True)])
def test_busy_is_the_share_of_all_cores_used_by_others(
    others: float, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    # wall, machine, own: two seconds, in which we used 3 CPU seconds
    clock = iter([(10.0, 100.0, 5.0), (12.0, 103.0 + 2 * 4 * others, 8.0)])
    monkeypatch.setattr(machine.Watch, "_now", staticmethod(lambda: next(clock)))
    with machine.Watch() as watch:
        pass
    assert watch.others == pytest.approx(4 * others)
    assert watch.busy is busy


def test_peak_memory_is_the_memory_a_call_adds_while_it_runs() -> None:
    def call() -> float:
        return float(np.ones(5_000_000).sum())  # 40 MB that are gone again

    call()
    found = machine.peak_bytes(call)
    if math.isnan(found):
        pytest.skip("this system does not tell the peak of resident memory")
    assert found == pytest.approx(40e6, rel=0.1)  # pages are counted in batches


def test_home_is_a_cache_for_small_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine._C, "own_l3_bytes", lambda: 1000)
    assert (machine.home_of(500), machine.home_of(501)) == ("cache", "DRAM")


@pytest.mark.usefixtures("compiler")
def test_ceilings_leave_what_they_read_and_bound_what_they_update() -> None:
    x = torch.randn(33, 1001)
    before = x.clone()
    isa = ops._C.isa()
    assert ceilings.read_probe(x, isa).rate() > 1e8  # bytes/s: no machine reads slower than this
    assert torch.equal(x, before)
    c, u = torch.randn(33, 1001), torch.randn(33, 1001)
    assert ceilings.update_probe(c, u, isa).rate() > 1e8
    assert c.abs().max() < 20  # c = u - c an even number of times
    to, c, u = operands.zeros(32, 1024), operands.normal(32, 1024), operands.normal(32, 1024)
    before = c.clone()
    assert ceilings.update_beside_probe(to, c, u, isa).rate() > 1e8
    assert torch.equal(to, u - c)
    assert torch.equal(c, before)
    with pytest.raises(ValueError, match="same shape"):
        ceilings.update_beside_probe(to, c, u[:2], isa)
    with pytest.raises(ValueError, match="cache lines"):
        ceilings.update_beside_probe(to[:1], c[:1], u.view(-1)[1:1025].view(1, 1024), isa)
    assert ceilings.fma_probe(isa).rate() > 1e8
    with pytest.raises(ValueError, match="same shape"):
        ceilings.update_probe(c, u[:2], isa)


def test_steps_that_write_new_rows_have_a_ceiling_of_their_own() -> None:
    of_op, step = memory_ops.memory_update(3, 1000), steps.mifa(3, 1000)
    assert [len(found.operands) for found in (of_op, step)] == [2, 3]
    times = {contender.name: [1e-6] * 3 for contender in step.contenders}
    rates = {"update beside": [24e9] * 3, "fma avx2": [1e15] * 3}
    found = Samples(times, rates, dict.fromkeys(times, 0.0), 0.0, False)
    ours = rows_of(step, found, "avx2")[0]
    # 12 S d + 24 d bytes are 60,000: 2.5 us at 24 GB/s
    assert (ours.bound, ours.percent_of_ceiling) == ("update beside", pytest.approx(250.0))
    assert ours.update_gbytes_per_s == pytest.approx(24.0)


def waits_for_a_spinning_thread() -> bool:
    stop = time.perf_counter() + 0.15

    def spin() -> None:
        while time.perf_counter() < stop:
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    harness.wait_out_threads(0.001)
    waited = time.perf_counter() >= stop - 0.02
    thread.join()
    return waited


def test_spinning_threads_are_waited_out() -> None:
    # On a busy machine the thread may not run for a while, and then does not spin.
    assert any(waits_for_a_spinning_thread() for _ in range(10))


@pytest.mark.parametrize("seconds", [0.0, 0.025])
def test_short_calls_are_warmed_up_before_every_batch(seconds: float) -> None:
    """Of a call that takes 25 ms, a millisecond makes no difference."""
    untimed, timed = [0], [0]
    timing = [untimed]

    def call() -> None:
        timing[0][0] += 1
        time.sleep(seconds)

    def timed_call(contender: harness.Contender, batch: int) -> float:
        timing[0] = timed
        found = original(contender, batch)
        timing[0] = untimed
        return found

    original = harness._timed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "_timed", timed_call)
        patch.setattr(harness, "peak_bytes", lambda _: 0.0)
        harness.sample([harness.Contender("x", call, role="peer")], [], 3, 0.0)
    assert timed[0] >= 3
    # Before the turns, a call compiles, and another one is timed for the size of the batches.
    assert (untimed[0] - 2 == 0) == (seconds > 0)
    start = time.perf_counter()
    harness.warm_up(lambda: None)
    assert time.perf_counter() - start >= harness._WARM_SECONDS


def test_measurements_without_ratios_are_listed_with_their_rule() -> None:
    assert report.left_out(rows_of(comparison(), samples(), "avx2")) == []
    busy = rows_of(comparison(), samples(busy=True), "avx2")
    lines = report.left_out(busy)
    assert len(lines) == len(busy)
    assert all("busy: others used more than 5%" in line for line in lines)


def test_a_run_of_some_comparisons_keeps_the_others(tmp_path: Path) -> None:
    first = rows_of(comparison(), samples(), "avx2")
    other = [replace(row, op="mimic_", K=None) for row in first]
    path = tmp_path / "ops.csv"
    old = [report.Measured(row, {"commit": "old"}) for row in (*first, *other)]
    report.write_csv(path, old)
    assert repr(report.read_csv(path)) == repr(old)  # NaN is not equal to NaN

    again = rows_of(comparison(), samples(fastagg=[2e-6] * 9), "avx2")
    new = [replace(row, op="scaffold_mean_") for row in first]
    merged = report.merge(path, [*again, *new])
    assert repr([one.row for one in merged]) == repr([*again, *other, *new])
    assert {one.row.op for one in merged if one.about == {"commit": "old"}} == {"mimic_"}
    report.write_markdown(tmp_path / "ops.md", merged, "Ops", "python -m benchmarks ops")
    text = (tmp_path / "ops.md").read_text()
    assert "mimic_: commit old" in text
    assert "gram, scaffold_mean_: cpu" in text


def test_ctrl_c_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = rows_of(comparison(), samples(), "avx2")
    other = [replace(row, op="mimic_", K=None) for row in first]
    table = tmp_path / ceilings.kind() / "ops.csv"
    table.parent.mkdir()
    report.write_csv(table, [report.Measured(row, {"commit": "old"}) for row in (*first, *other)])

    def measured(case: options.Case, *_: object, **__: object) -> list[Row]:
        if case.op == "mimic_":
            raise KeyboardInterrupt
        return rows_of(comparison(), samples(fastagg=[2e-6] * 9), "avx2")

    cases = [options.Case(op, 3, 1000, lambda S, d: comparison()) for op in ("gram", "mimic_")]
    monkeypatch.setattr(options, "_timed", measured)
    monkeypatch.setitem(entry._CASES, "ops", lambda _: cases)
    copy = tmp_path / "here.csv"
    arguments = ["ops", "--quick", "--threads", "1", "--out", str(tmp_path), "--csv", str(copy)]
    with pytest.raises(SystemExit) as stop:
        entry.main(arguments)
    assert stop.value.code == 130
    assert {one.row.op for one in report.read_csv(copy)} == {"gram"}
    assert "stopped: 1 of 2 comparisons are measured" in capsys.readouterr().out
    old = {one.row.op: one.about.get("commit") == "old" for one in report.read_csv(table)}
    assert old == {"gram": False, "mimic_": True}

    del cases[0]  # nothing was measured: nothing is written
    before = table.read_bytes()
    copy.unlink()
    with pytest.raises(SystemExit) as stop:
        entry.main(arguments)
    assert stop.value.code == 130 and table.read_bytes() == before and not copy.exists()


@pytest.mark.parametrize(
    ("products", "expected", "pauses"),
    [
        ([31.8e9], 31.8, 0),  # two vectors: there is no more
        ([16e9], 16.0, 9),
        ([16e9, 31.8e9], 31.8, 1),  # others on the core at first
        ([8e9] * 12 + [15.8e9], 15.8, 12),
        ([8e9], 8.0, 50),  # and all the time
    ],
)
def test_multiply_adds_are_counted_again_while_others_use_the_core(
    products: list[float],
    expected: float,
    pauses: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rounds: list[float] = []
    given = iter([*(rate for rate in products for _ in range(40)), *[products[-1]] * 4000])
    monkeypatch.setattr(ceilings, "_products_per_second", lambda isa: next(given))
    monkeypatch.setattr(ceilings, "_cycles_per_second", lambda: 1e9)
    monkeypatch.setattr(ceilings.time, "sleep", rounds.append)
    assert ceilings.fma_per_cycle.__wrapped__("avx512") == pytest.approx(expected)
    said = capsys.readouterr().err
    assert ("8.0 multiply-adds per cycle: others use this core" in said) == (expected == 8.0)
    assert len(rounds) == pauses


@pytest.mark.usefixtures("compiler")
def test_the_kind_of_processor() -> None:
    isa, number, *maker = ceilings.kind().split("-")
    assert isa == fastagg.build_info()["isa"]
    assert int(number) in (2, 4, 8, 16, 32, 64)
    described = Path("/proc/cpuinfo")
    by_intel = described.exists() and "GenuineIntel" in described.read_text()
    assert maker == (["intel"] if by_intel else [])
