# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: every subcommand runs, figures follow the stated formulas, and no ratio is given
when it would mean nothing. How fast anything is, is not tested here."""

from __future__ import annotations

import csv
import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import (
    accuracy,
    ceilings,
    machine,
    memory_ops,
    ops,
    pair_ops,
    peers,
    report,
    robust,
    scaling,
    sharded,
    simulation,
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
    rows_of,
    spread,
)
from benchmarks.options import Options
from benchmarks.work import WORK, Work
from fastagg import bits

needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++")), reason="the ceilings need a C++ compiler"
)

# --- every subcommand ------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two small shapes for everything."""
    monkeypatch.setattr(ops, "GRAM_SHAPES", [(3, 5000), (7, 2000)])
    monkeypatch.setattr(ops, "AVX2_SHAPES", {(3, 5000)})
    monkeypatch.setattr(ops, "LIST_SHAPES", [(3, 5000)])
    monkeypatch.setattr(ops, "PAIR_SHAPES", [(20, 5000)])
    monkeypatch.setattr(ops, "ROW_SHAPES", [(3, 5000)])
    monkeypatch.setattr(ops, "CLIENTS", 500)
    monkeypatch.setattr(steps, "SHAPES", [(3, 5000)])
    monkeypatch.setattr(steps, "ROBUST_SHAPES", [(7, 5000)])
    monkeypatch.setattr(steps, "NNM_SHAPES", [(7, 5000)])
    monkeypatch.setattr(scaling, "ROWS", [1, 3])
    monkeypatch.setattr(scaling, "PARAMETERS", [5000])
    monkeypatch.setattr(scaling, "CLIENTS", [10])


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


COLUMNS = [*(field.name for field in fields(Row)), *machine.describe()]


@needs_compiler
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ops", {name for name in WORK if not name.startswith("step ")}),
        ("steps", {name for name in WORK if name.startswith("step ")}),
        ("scaling", {"gram", "weighted_sum_", "mimic_", "memory_update_", "step fdms"}),
    ],
)
def test_a_timing_subcommand_writes_what_it_promises(
    name: str, expected: set[str], tmp_path: Path
) -> None:
    table = tmp_path / "table.csv"
    command.main([name, "--quick", "--threads", "1", "--csv", str(table), "--out", str(tmp_path)])
    rows = read(table)
    assert list(rows[0]) == COLUMNS
    assert {row["op"] for row in rows} == expected
    assert read(tmp_path / f"{name}.csv") == rows
    assert (tmp_path / f"{name}.md").read_text("utf-8").count("\n| ") >= len(rows)
    for row in rows:
        work, seconds = WORK[row["op"]](int(row["S"]), int(row["d"])), float(row["us"]) * 1e-6
        # The CSV has five digits.
        assert float(row["gbytes_per_s"]) == pytest.approx(work.num_bytes / seconds / 1e9, rel=1e-3)
        assert float(row["gflops"]) == pytest.approx(work.flops / seconds / 1e9, rel=1e-3)
        assert float(row["us_q1"]) <= float(row["us"]) <= float(row["us_q3"])
        assert bool(row["read_gbytes_per_s"]) == (work.pattern == "read")
        assert bool(row["update_gbytes_per_s"]) == (work.pattern == "update")
        refused = row["verdict"] in ("busy", "noisy")
        assert refused == (row["percent_of_ceiling"] == "")
        if refused:
            assert row["times_ours"] == ""
    ours = [row for row in rows if row["role"] == "ours"]
    assert len(ours) == len({(r["op"], r["K"], r["S"], r["d"], r["threads"]) for r in rows})


@needs_compiler
@pytest.mark.usefixtures("tiny")
def test_main_writes_both_tables_and_the_roofline(tmp_path: Path) -> None:
    command.main(["main", "--quick", "--threads", "1", "--out", str(tmp_path), "--repeats", "3"])
    assert {path.name for path in tmp_path.iterdir()} == {
        "ops.csv", "ops.md", "steps.csv", "steps.md", "roofline.png",
    }  # fmt: skip
    (tmp_path / "roofline.png").unlink()
    command.main(["pictures", "--out", str(tmp_path)])
    assert (tmp_path / "roofline.png").stat().st_size > 10_000


def test_accuracy_writes_errors_and_their_picture(tmp_path: Path) -> None:
    command.main(["accuracy", "--quick", "--threads", "1", "--out", str(tmp_path)])
    rows = read(tmp_path / "accuracy.csv")
    columns = [*(field.name for field in fields(accuracy.Error)), *machine.describe()]
    assert list(rows[0]) == columns
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
    assert {row["quantity"] for row in rows} == {"cosine", "gram", "abs_max", *accuracy.op_calls(3)}
    # Every op on every kind of rows at every scale.
    cases = Counter((row["quantity"], row["scale"]) for row in rows if row["by"] == "fastagg")
    assert set(cases) == {(name, scale) for name, _ in cases for scale in ("1", *accuracy.SCALES)}
    ours = [row for row in rows if row["by"] == "fastagg"]
    # Few columns: nearly plain float32 inside one block, a few roundings of 6e-8 each; of denormal
    # rows, sums of eight and more of them.
    assert max(float(row["error"]) for row in ours) < 1e-6
    largest = [r for r in rows if r["scale"] == "1e18" and r["by"] == "torch X @ X.T"]
    assert largest and all(row["error"] == "inf" for row in largest)


def test_accuracy_says_what_is_missed() -> None:
    def verdicts(*errors: tuple[str, str, str, float]) -> set[str]:
        made = [accuracy.Error(q, "positive", scale, 8, 10, by, e, 1) for q, by, scale, e in errors]
        filled = [replace(e, rows=kind) for e in made for kind in accuracy.KINDS]
        return {line[-1] for _, lines in accuracy.tables(filled).values() for line in lines}

    library = ("cosine", "torch X @ X.T", "1", 1e-3)
    assert verdicts(library, ("cosine", "fastagg", "1", 9e-9)) == {"met"}
    assert verdicts(library, ("cosine", "fastagg", "1e18", 2e-8)) == {"missed", "stated"}
    assert verdicts(("mimic_", "fastagg", "1", 2e-7)) == {"met"}
    assert verdicts(("mimic_", "fastagg", "1", 3e-7)) == {"missed"}
    assert verdicts(("abs_max", "fastagg", "1", 1e-12)) == {"missed"}
    assert verdicts(("mimic_", "fastagg", "1e-40", 1.0)) == {"stated"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["ops", "--threads", "0"], "--threads"),
        (["ops", "--repeats", "2"], "--repeats"),
        (["ops", "--only", "no such op"], "--only"),
        (["accuracy", "--max-d", "10"], "--max-d"),
        (["simulation", "--only", "no such case"], "--only"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        command.main(arguments)


@pytest.mark.slow
def test_the_sharded_subcommand_starts_ranks_and_writes_what_it_promises(tmp_path: Path) -> None:
    command.main(["sharded", "--quick", "--ranks", "1", "2", "--out", str(tmp_path)])
    with (tmp_path / "sharded.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row["what"] == "step fdms"]
    assert [(row["ranks"], row["d"]) for row in steps] == [("1", "16384"), ("2", "32768")]
    assert all(float(row["ms"]) > 0.0 for row in rows)
    assert "| step mifa | 2 | 16 | 32,768 |" in (tmp_path / "sharded.md").read_text("utf-8")


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in command.SUBCOMMANDS)


@pytest.mark.parametrize("path", sorted(command.RESULTS.glob("*.csv")), ids=lambda path: path.name)
def test_committed_results_have_the_columns_of_today(path: Path) -> None:
    others = {
        "accuracy.csv": accuracy.Error,
        "sharded.csv": sharded.Line,
        "simulation.csv": simulation.Line,
    }
    if path.name in others:
        expected = [*(field.name for field in fields(others[path.name])), *machine.describe()]
    else:
        expected = COLUMNS
    assert list(read(path)[0]) == expected


# --- formulas --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "num_bytes", "flops"),
    [
        # S = 3 rows of d = 10: 30 numbers in X. Six products of rows, diagonal included.
        ("gram", 4 * 30, 6 * 2 * 10),
        ("weighted_sum_", 4 * (30 + 10 + 10), 2 * 30),
        # X and corrections read, corrections written; parameters read and written.
        ("mimic_", 4 * (3 * 30 + 10 + 10), 30 + 30 + 30 + 2 * 10),
        # ... and a total of 8 bytes a number, read and written.
        ("memory_update_", 4 * (3 * 30 + 10 + 10) + 8 * (10 + 10), 3 * 30 + 3 * 10),
        ("step fdms", 4 * (30 + 10 + 10), 6 * 2 * 10 + 2 * 30),
        ("step nnm", 4 * (2 * 30 + 10 + 10), 6 * 2 * 10 + 2 * 30),
    ],
)
def test_formulas(op: str, num_bytes: int, flops: int) -> None:
    work = WORK[op](3, 10)
    assert (work.num_bytes, work.flops) == (num_bytes, flops)


def test_floor_is_the_slower_of_bytes_and_flops() -> None:
    work = Work(num_bytes=1000, flops=500, pattern="read")
    assert work.floor(bandwidth=100, peak=100) == 10
    assert work.floor(bandwidth=1000, peak=100) == 5
    assert work.intensity == 0.5


# --- what a row says, and when it says nothing -------------------------------------------------


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
    rates = {"read": [12e9, 24e9, 48e9], "fma avx2": [12e9] * 3}
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
    # The noisy one is now the fastest careful way: nothing can be said against the baseline.
    assert math.isnan(ours.times_baseline)
    rows = rows_of(comparison(), samples(fastagg=noisy), "avx2")
    assert all(math.isnan(row.times_ours) for row in rows)


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


def test_targets_say_what_was_met_and_what_was_not() -> None:
    rows = rows_of(comparison(), samples(), "avx2")

    def line(*target: object) -> tuple[str, ...]:
        chosen = targets.Target("gram", ((3, 1000), (4, 1000)), *target)  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(targets, "TARGETS", [chosen])
            (only,) = targets.verdicts(rows)  # (4, 1000) was not measured
        return only

    assert line("careful", 2.0)[4:] == ("fastest careful: careful", "2.00 x", "2.00 x", "met")
    assert line("careful", 2.1)[-1] == "missed"
    assert line("slow", 4.1)[-2:] == ("4.00 x", "missed")
    assert line("naive", 8.0)[-1] == "met"  # by role
    assert line("ceiling", 101)[-2:] == ("100 %", "missed")
    assert line("seconds", 2e-6)[-2:] == ("1e-06 s", "met")
    assert line("seconds", 5e-7)[-1] == "missed"
    assert line("S x d", 400.0)[-2:] == ("4.2e+02", "missed")  # 5 MB over 12,000 bytes
    assert line("ByzFL", 10.0)[-2:] == ("-", "absent")
    rows = rows_of(comparison(), samples(busy=True), "avx2")
    assert line("careful", 1.0)[-2:] == ("-", "busy")
    assert line("seconds", 1.0)[-1] == "busy"
    assert targets.summary([("a", "met"), ("b", "met"), ("c", "busy")]) == "2 met, 1 busy"


def test_every_target_is_about_something_that_is_measured() -> None:
    options = Options(threads=2, repeats=9, quick=False, only="")
    measured = {(case.op, case.S, case.d) for case in (*ops.cases(options), *steps.cases(options))}
    asked = {(target.op, *shape) for target in targets.TARGETS for shape in target.shapes}
    assert asked <= measured


@needs_compiler
def test_a_disturbed_comparison_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[bool] = []

    def disturbed_once(*_: object) -> Samples:
        rounds.append(len(rounds) == 0)
        times = {c.name: [1e-6] * 9 for c in comparison().contenders}
        rates = {"read": [1e9], f"fma {ops._C.isa()}": [1e9]}
        return Samples(times, rates, dict.fromkeys(times, 0.0), 0.0, rounds[-1])

    monkeypatch.setattr("benchmarks.harness.sample", disturbed_once)
    monkeypatch.setattr("benchmarks.harness.time.sleep", lambda seconds: None)
    rows = compare(comparison(), repeats=9)
    assert rounds == [True, False]
    assert {row.verdict for row in rows} == {"ok"}


# --- the machine -------------------------------------------------------------------------------


@pytest.mark.parametrize(("others", "busy"), [(0.0, False), (0.04, False), (0.06, True)])
def test_busy_is_what_others_use_of_all_cores(
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


def test_peak_memory_is_what_a_call_adds_while_it_runs() -> None:
    def call() -> float:
        return float(np.ones(5_000_000).sum())  # 40 MB that are gone again

    call()
    found = machine.peak_bytes(call)
    if math.isnan(found):
        pytest.skip("this system does not tell the peak of resident memory")
    assert found == pytest.approx(40e6, rel=0.1)  # pages are counted in batches


def test_home_is_a_cache_for_small_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cache_bytes", lambda level: 1000)
    assert (machine.home_of(500), machine.home_of(501)) == ("cache", "DRAM")


@needs_compiler
def test_ceilings_leave_what_they_read_and_bound_what_they_update() -> None:
    x = torch.randn(33, 1001)
    before = x.clone()
    isa = ops._C.isa()
    assert ceilings.read_probe(x, isa).rate() > 1e8  # bytes/s: no machine reads slower than this
    assert torch.equal(x, before)
    c, u = torch.randn(33, 1001), torch.randn(33, 1001)
    assert ceilings.update_probe(c, u, isa).rate() > 1e8
    assert c.abs().max() < 20  # c = u - c an even number of times
    assert ceilings.fma_probe(isa).rate() > 1e8
    with pytest.raises(ValueError, match="one shape"):
        ceilings.update_probe(c, u[:2], isa)


# --- contenders do the same ----------------------------------------------------------------------

MAKERS: dict[str, Callable[[int, int], Comparison]] = {
    "gram": lambda S, d: ops.gram(S, d, with_avx2=True),
    "gram of a list": ops.gram_of_list,
    "gram of groups": ops.gram_of_groups,
    "gram of all pairs": ops.gram_of_all_pairs,
    "gram_and_sum_": ops.gram_and_sum,
    "weighted_sum_": ops.weighted_sum,
    "mimic_": memory_ops.mimic,
    "memory_update_": memory_ops.memory_update,
    "step fdms": steps.fdms,
    "step fedavg": steps.fedavg,
    "step geometric-median": robust.geometric_median,
    "step multi-krum": robust.multi_krum,
    "step nnm": robust.nnm,
}


@pytest.mark.parametrize("name", MAKERS)
def test_contenders_compute_the_same(name: str) -> None:
    """Each from fresh operands, at a width that takes the "blocks" contenders over two blocks."""

    def result(index: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        value = MAKERS[name](8, 40_000).contenders[index].call()
        tensors = [
            torch.as_tensor(v).double() for v in (value if type(value) is tuple else [value])
        ]
        return [t.triu() if t.dim() == 2 else t for t in tensors]

    expected = result(0)
    for index, contender in enumerate(MAKERS[name](8, 40_000).contenders):
        for found, right in zip(result(index), expected, strict=True):
            # float32 sums of 40,000 products err by 1e-5 or so of the largest; ByzFL's median
            # starts at zero and is not as far after 8 iterations (4e-4 measured)
            error = (found - right).abs().max() / right.abs().max()
            assert error < (1e-3 if contender.role == "peer" else 1e-4), contender.name


@pytest.mark.parametrize("name", pair_ops.MAKERS)
def test_contenders_on_pairs_compute_the_same(name: str) -> None:
    """At a K that is no multiple of a byte of flags or of the blocks of the eager ways."""

    def result(index: int) -> torch.Tensor:
        torch.manual_seed(0)
        found = pair_ops.MAKERS[name](75, 150).contenders[index].call()
        assert isinstance(found, torch.Tensor)
        return bits.unpack(found, 150) if found.dtype == torch.uint8 else found

    # Scores are rounded to float32 once by fastagg, at every step by eager torch.
    torch.testing.assert_close(result(1), result(0), rtol=1e-6, atol=1e-6, equal_nan=False)


def test_every_comparison_has_one_fastagg_and_a_careful_way() -> None:
    for make in (*MAKERS.values(), steps.mimic, steps.mifa):
        roles = [contender.role for contender in make(4, 1000).contenders]
        assert roles.count("ours") == 1
        assert "careful" in roles


def test_absent_peers_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "installed", lambda name: False)
    peers.announce(report.make_console())
    text = capsys.readouterr().out
    assert "flwr is not installed" in text
    assert "byzfl is not installed" in text
    assert peers.flower_aggregate() is None
    assert peers.flower_krum() is None
    assert peers.byzfl_aggregators() is None


def test_a_role_must_be_known() -> None:
    with pytest.raises(ValueError, match="role: expected one of"):
        Contender("x", lambda: None, "fastest")
