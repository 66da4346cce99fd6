# SPDX-License-Identifier: Apache-2.0
"""The table of times spent in each part of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastagg_sim.cli import main
from fastagg_sim.config import ConfigError
from fastagg_sim.timings import read_spent, shares

HEADER = "method,rule,dropout,seed,round,seconds_training,seconds_aggregation,seconds_evaluation\n"


def write(folder: Path, *rounds: tuple[str, int, float, float, float]) -> None:
    folder.mkdir(parents=True)
    lines = [f"{m},rule,half,{seed},0,{t},{s},{e}\n" for m, seed, t, s, e in rounds]
    (folder / "timings.csv").write_text(HEADER + "".join(lines))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    write(tmp_path / "a", ("FDMS", 0, 1.0, 0.02, 0.0), ("FDMS", 1, 2.0, 0.04, 0.94))
    write(tmp_path / "deeper" / "b", ("Full", 0, 0.5, 0.1, 0.4), ("FDMS", 0, 1.0, 0.0, 1.0))
    write(tmp_path / "a" / "jobs" / "FDMS_half_seed0", ("FDMS", 0, 9.0, 9.0, 9.0))
    return tmp_path


def test_rounds_of_a_method_are_added_up(results: Path) -> None:
    spent = {(one.folder, one.method): one for one in read_spent([results])}
    assert list(spent) == [("a", "FDMS"), ("deeper/b", "Full"), ("deeper/b", "FDMS")]
    fdms = spent["a", "FDMS"]
    assert (fdms.rounds, fdms.training, fdms.evaluation) == (2, 3.0, 0.94)
    assert fdms.share == pytest.approx(0.06 / 4.0)
    assert [one.folder for one in read_spent([results / "deeper" / "b"])] == ["b", "b"]


def test_table_marks_what_is_above_the_limit(results: Path) -> None:
    rows = shares(read_spent([results]), 0.05).rows
    assert [row[-1] for row in rows] == ["1.50%", "10.00% !", "0.00%"]
    assert rows[0][2:6] == ("2", "1500.00", "30.00", "470.00")


def test_command(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timings", str(results)]) == 3
    assert (
        "| deeper/b | Full | 1 | 500.00 | 100.00 | 400.00 | 10.00% ! |" in capsys.readouterr().out
    )
    assert main(["timings", str(results), "--limit", "0.2"]) == 0
    assert main(["timings", str(results / "nothing")]) == 2
    assert "expected a results folder" in capsys.readouterr().err


def test_the_server_step_takes_less_than_5_percent_of_a_round_in_the_results_here() -> None:
    # In scale-friends 1,000 clients train a logistic regression for five steps, and the server
    # finds friends of the 99,000 others.
    spent = read_spent([Path(__file__).parents[2] / "results"])
    spent = [one for one in spent if one.folder != "scale-friends"]
    assert len(spent) > 100
    # On Synthetic(1,1), a client takes one step of a logistic model, and the runs were made on a
    # slower kind of machine or beside other work: docs/benchmarks.md states the shares.
    known = "adversarial-fig9/byzantine"
    above = [one for one in spent if one.share > 0.05]
    expected = {(known, "bucketing GM"), (known, "bucketing cclip")}
    assert {(one.folder, one.method) for one in above} == expected
    assert all(one.share < 0.06 for one in above)


def test_no_results_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "jobs" / "only")
    with pytest.raises(ConfigError, match="none"):
        read_spent([tmp_path])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: expected a header with method, "),
        (HEADER, "expected the rows of finished jobs"),
        (HEADER + "m,r,half,0,0,1.0\n", "line 2: expected 8 cells"),
        (HEADER + "m,r,half,0,0,1.0,x,1.0\n", "line 2: expected numbers"),
    ],
)
def test_damaged_times_are_one_clear_error(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "timings.csv").write_text(content)
    with pytest.raises(ConfigError, match=rf"timings\.csv.*{message}"):
        read_spent([tmp_path])
