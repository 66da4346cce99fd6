# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: every subcommand runs, figures follow the stated formulas, and no meaningless
ratio is reported. Speed itself is not tested here."""

from __future__ import annotations

import ast
import csv
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import (
    accuracy,
    busy,
    clients,
    columns,
    cuda,
    friends,
    highway,
    machine,
    memory_ops,
    moments,
    ops,
    pair_ops,
    peers,
    report,
    robust,
    scaling,
    sharded,
    simulation,
    small,
    spinning,
    steps,
)
from benchmarks.attacks.setting import Result as AttackResult
from benchmarks.ceilings import kind
from benchmarks.harness import (
    Comparison,
    Contender,
    Row,
)
from benchmarks.work import WORK, Work
from fastagg.ops import bits
from tests.fuzz import long

# --- every subcommand ------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one or two small shapes in every subcommand."""
    monkeypatch.setattr(ops, "GRAM_SHAPES", [(3, 5000), (7, 2000)])
    monkeypatch.setattr(ops, "AVX2_SHAPES", {(3, 5000)})
    monkeypatch.setattr(ops, "LIST_SHAPES", [(3, 5000)])
    monkeypatch.setattr(ops, "PAIR_SHAPES", [(20, 5000)])
    monkeypatch.setattr(ops, "ROW_SHAPES", [(3, 5000)])
    monkeypatch.setattr(ops, "VECTORS", [5000])
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


COLUMNS = [*(field.name for field in fields(Row)), *machine.describe(), "blas"]


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ops", {name for name in WORK if not name.startswith(("step ", "columns "))}),
        ("columns", {name for name in WORK if name.startswith("columns ")}),
        ("steps", {name for name in WORK if name.startswith("step ")}),
        ("scaling", {"gram", "weighted_sum_", "mimic_", "memory_update_", "step fdms"}),
    ],
)
def test_a_timing_subcommand_writes_its_documented_files(
    name: str, expected: set[str], tmp_path: Path
) -> None:
    table = tmp_path / "table.csv"
    command.main([name, "--quick", "--threads", "1", "--csv", str(table), "--out", str(tmp_path)])
    rows = read(table)
    assert list(rows[0]) == COLUMNS
    assert {row["op"] for row in rows} == expected
    folder = tmp_path / kind()
    assert read(folder / f"{name}.csv") == rows
    assert (folder / f"{name}.md").read_text("utf-8").count("\n| ") >= len(rows)
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
        # With a noisy share of the ceiling, a ratio of two times may be known.
        if row["verdict"] == "busy":
            assert row["times_ours"] == ""
    ours = [row for row in rows if row["role"] == "ours"]
    assert len(ours) == len({(r["op"], r["K"], r["S"], r["d"], r["threads"]) for r in rows})


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.usefixtures("tiny")
def test_main_writes_both_tables_and_the_roofline(tmp_path: Path) -> None:
    command.main(["main", "--quick", "--threads", "1", "--out", str(tmp_path), "--repeats", "3"])
    folder = tmp_path / kind()
    assert {path.name for path in folder.iterdir()} == {
        "ops.csv", "ops.md", "steps.csv", "steps.md", "roofline.png",
    }  # fmt: skip
    (folder / "roofline.png").unlink()
    command.main(["pictures", "--out", str(tmp_path)])
    assert (folder / "roofline.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_abi_times_every_interface(tmp_path: Path) -> None:
    command.main(["abi", "--repeats", "2", "--out", str(tmp_path)])
    table = (tmp_path / kind() / "abi.md").read_text(encoding="utf-8").splitlines()[-4:]
    assert ["C++" in table[0], "stable" in table[1], "C function" in table[3]] == [True] * 3
    for line in table:
        assert all(float(cell) > 0.0 for cell in line.strip("| ").split("|")[1:])


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_spinning_times_each_setting_in_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spinning, "_S", 3)
    monkeypatch.setattr(spinning, "_D", 50_000)
    command.main(["spinning", "--turns", "2", "--out", str(tmp_path)])
    lines = (tmp_path / kind() / "spinning.md").read_text(encoding="utf-8").splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[6:]]
    assert [row[0] for row in table] == [name for name in spinning.SETTINGS for _ in range(3)]
    for _, operation, rule, alone, after, ratio in table:
        assert rule.strip("`") in spinning.RULES
        assert min(map(float, (alone, after, ratio.split()[0]))) > 0.0
        assert float(operation) < 1000.0
    with pytest.raises(SystemExit, match="--turns: expected a number >= 1, got 0"):
        command.main(["spinning", "--turns", "0"])


def test_each_setting_of_spinning_has_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "SOME_OTHER"):
        monkeypatch.setenv(name, "7")
    found = {name: spinning.environment(name) for name in spinning.SETTINGS}
    assert {env["SOME_OTHER"] for env in found.values()} == {"7"}
    assert [(e.get("GOMP_SPINCOUNT"), e.get("OMP_WAIT_POLICY")) for e in found.values()] == [
        (None, None),
        ("1000", None),
        (None, "passive"),
    ]


@pytest.mark.usefixtures("compiler")
def test_highway_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--source: there is no hwy/highway\.h in "):
        command.main(["highway", "--source", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_highway_computes_the_same(tmp_path: Path) -> None:
    folder = os.environ.get("HIGHWAY_SOURCE")
    try:
        highway.find(Path(folder) if folder else None, os.environ.get("CXX") or "c++")
    except SystemExit as why:
        pytest.skip(f"{why} (HIGHWAY_SOURCE: a checkout for this test)")
    source = ["--source", folder] if folder else []
    measured = ["--repeats", "2", "--compiles", "1", "--out", str(tmp_path)]
    command.main(["highway", *source, *measured])
    *table, bits = (tmp_path / kind() / "highway.md").read_text(encoding="utf-8").splitlines()
    assert bits.endswith("| the same |")
    for line in table[-6:]:
        assert all(float(cell.replace(",", "")) > 0.0 for cell in line.strip("| ").split("|")[1:])


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_small_times_ops_python_and_eager_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "SIZES", [(16, 8)])
    monkeypatch.setattr(small, "WIDTHS", [50])
    command.main(["small", "--seconds", "0.001", "--out", str(tmp_path)])
    rows = read(tmp_path / kind() / "small.csv")
    assert [row["rule"] for row in rows] == list(small.RULES)
    for row in rows:
        assert float(row["ops"]) > 0.0
        assert row["profile"]
        assert (float(row["eager_torch"]) > 0.0) == (row["rule"] in {*small._EAGER, "fdms"})
        assert (float(row["eager_numpy"]) > 0.0) == (
            row["rule"] in {"fedavg", "mimic", "mifa", "stale"}
        )


@pytest.mark.slow
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
        (["simulation", "--repeats", "1"], "--repeats: expected a number >= 2, got 1"),
        (["clients", "--rounds", "1"], "--rounds: expected a number >= 2, got 1"),
        (["friends", "--repeats", "0"], "--repeats: expected a number >= 1, got 0"),
        (["pauses", "--repeats", "-1"], "--repeats: expected a number >= 1, got -1"),
        (["small", "--seconds", "nan"], "--seconds: expected a finite number > 0, got nan"),
        (["pictures", "--out", "no such folder"], "--out: expected a folder with results"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        command.main(arguments)


@pytest.mark.slow
def test_the_sharded_subcommand_starts_ranks_and_writes_its_files(tmp_path: Path) -> None:
    command.main(["sharded", "--quick", "--ranks", "1", "2", "--out", str(tmp_path)])
    with (tmp_path / "sharded.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row["what"] == "step fdms"]
    assert [(row["ranks"], row["d"]) for row in steps] == [("1", "16384"), ("2", "32768")]
    assert all(float(row["ms"]) > 0.0 for row in rows)
    assert "| step mifa | 2 | 16 | 32,768 |" in (tmp_path / "sharded.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("ms", "ranks", "expected"),
    [(10.0, 1, 1.0), (10.0, 2, 1.0), (12.5, 2, 0.8), (20.0, 4, 1.0), (25.0, 4, 0.8)],
)
def test_efficiency_counts_the_cores_that_ranks_share(
    ms: float, ranks: int, expected: float
) -> None:
    """On two cores, four ranks that take twice as long as one rank are fully efficient."""
    assert sharded.throughput(10.0, ms, ranks, cores=2) == pytest.approx(expected)


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in command.SUBCOMMANDS)


@pytest.mark.parametrize("path", sorted(command.RESULTS.rglob("*.csv")), ids=lambda path: path.name)
def test_committed_results_have_the_current_columns(path: Path) -> None:
    others = {
        "accuracy.csv": accuracy.Error,
        "busy.csv": busy.Timed,
        "clients.csv": clients.Timed,
        "friends.csv": friends.Timed,
        "small.csv": small.Timed,
        "sharded.csv": sharded.Line,
        "simulation.csv": simulation.Line,
    }
    # What the first two show depends on no machine's speed; cuda.md names the GPU.
    without_machine = {
        "attacks.csv": AttackResult,
        "long_runs.csv": long.Run,
        "cuda.csv": cuda.Row,
    }
    if path.name in without_machine:
        expected = [field.name for field in fields(without_machine[path.name])]
    elif path.name in others:
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
        # The aggregate is read; parameters and two moments are read and written.
        ("add_adaptive_", 4 * (10 + 3 * 20), 12 * 10),
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


# --- contenders agree ----------------------------------------------------------------------

MAKERS: dict[str, Callable[[int, int], Comparison]] = {
    "gram": lambda S, d: ops.gram(S, d, with_avx2=True),
    "gram of a list": ops.gram_of_list,
    "gram of groups": ops.gram_of_groups,
    "gram of all pairs": ops.gram_of_all_pairs,
    "gram_and_sum_": ops.gram_and_sum,
    "weighted_sum_": ops.weighted_sum,
    "add_adaptive_": moments.adam,
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
    """Run each on fresh operands, at a width that takes the "blocks" contenders over two blocks."""

    def result(index: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        value = MAKERS[name](8, 40_000).contenders[index].call()
        tensors = [
            torch.as_tensor(v).double() for v in (value if type(value) is tuple else [value])
        ]
        return [t.tril() if t.dim() == 2 else t for t in tensors]  # all that ssyrk computes

    expected = result(0)
    for index, contender in enumerate(MAKERS[name](8, 40_000).contenders):
        for found, right in zip(result(index), expected, strict=True):
            # float32 sums of 40,000 products err by 1e-5 or so of the largest; ByzFL's median
            # starts at zero and is not as far after 8 iterations (4e-4 measured)
            error = (found - right).abs().max() / right.abs().max()
            assert error < (1e-3 if contender.role == "peer" else 1e-4), contender.name


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("S", [10, 11, 35])
@pytest.mark.parametrize("make", [columns.median, columns.trimmed_mean, columns.meamed])
def test_contenders_on_columns_compute_the_same(
    make: Callable[[int, int], Comparison], S: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a width that no number of threads or of columns of a block divides."""
    monkeypatch.setattr(columns, "_BLOCK_BYTES", 4 * S * 60)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    def result(index: int) -> torch.Tensor:
        torch.manual_seed(0)
        return torch.as_tensor(make(S, 500).contenders[index].call())

    for index, contender in enumerate(make(S, 500).contenders):
        if contender.name == "torch.median" and S % 2 == 0:
            continue  # it returns the lower one of the two middle values
        # Others round sums of up to 35 numbers of about 1 in float32.
        right = torch.allclose(result(index), result(0), rtol=1e-6, atol=1e-6)
        assert right, contender.name


@pytest.mark.parametrize("name", pair_ops.MAKERS)
def test_contenders_on_pairs_compute_the_same(name: str) -> None:
    """Use a K that is no multiple of a byte of flags or of the blocks of the eager variants."""

    def result(index: int) -> torch.Tensor:
        torch.manual_seed(0)
        found = pair_ops.MAKERS[name](75, 150).contenders[index].call()
        assert isinstance(found, torch.Tensor)
        return bits.unpack(found, 150) if found.dtype == torch.uint8 else found

    # Scores are rounded to float32 once by fastagg, at every step by eager torch.
    torch.testing.assert_close(result(1), result(0), rtol=1e-6, atol=1e-6, equal_nan=False)


def test_every_comparison_has_one_fastagg_and_a_careful_way() -> None:
    remembering = (steps.mimic, steps.mimic_aged, steps.mifa, steps.stale, steps.fedvarp)
    for make in (*MAKERS.values(), *remembering):
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


@pytest.mark.slow
def test_peers_are_measured_without_kernel_overrides() -> None:
    """OPENBLAS_CORETYPE would give numpy and scipy the kernels of another processor."""
    code = "import os, benchmarks.__main__; print([k for k in os.environ if 'OPENBLAS' in k])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_L2_SIZE": "512"},
        capture_output=True,
        text=True,
        check=True,
    )
    names = set(ast.literal_eval(done.stdout))
    assert "OPENBLAS_THREAD_TIMEOUT" in names
    assert not names & {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"}
    assert machine.blas() != "unknown"  # and tables name the kernels used
