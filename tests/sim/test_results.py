# SPDX-License-Identifier: Apache-2.0
"""Results folders: identity, merging, reading back, tables and figures."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fastagg_sim import report
from fastagg_sim.cli import main
from fastagg_sim.config import (
    Config,
    ConfigError,
    Dropout,
    Job,
    Latency,
    LocalTraining,
    Method,
    Task,
    job_key,
    to_json,
)
from fastagg_sim.dropout.trace import write_trace
from fastagg_sim.input_files import input_files
from fastagg_sim.job_folder import JOB_COLUMNS, METRIC_COLUMNS, TIMING_COLUMNS
from fastagg_sim.plots import plot_folder
from fastagg_sim.records import Curve, Scores, read_curves, read_scores
from fastagg_sim.report import compute
from fastagg_sim.results import ResultsFolder, read_config
from fastagg_sim.runner import Interrupted
from fastagg_sim.tables import Grid, summary, time_target, time_to

CONFIG = Config(
    name="fake",
    task=Task("digits", "clustered", "logistic", LocalTraining(local_epochs=1), rounds=3),
    methods=(Method("Full", "fedavg", full_participation=True), Method("FDMS", "fdms")),
    dropouts=(Dropout("exact", {"alpha": 0.5}), Dropout("exact", {"alpha": 0.7})),
    seeds=(0, 1),
)


def fake_results(path: Path, config: Config = CONFIG) -> ResultsFolder:
    """Write a results folder with accuracy .1 r + .01 seed (+ .2 for Full) in round r."""
    folder = ResultsFolder(path, config)
    folder.prepare()
    for job in folder.job_folders():
        prefix = ",".join(
            (job.job.method.label, job.job.method.rule, job.job.dropout.label, str(job.job.seed))
        )
        base = 0.01 * job.job.seed + (0.2 if job.job.method.label == "Full" else 0.0)
        metrics = [",".join(JOB_COLUMNS + METRIC_COLUMNS)]
        timings = [",".join(JOB_COLUMNS + TIMING_COLUMNS)]
        for r in range(3):
            evaluated = f"{0.1 * r + base:.6f},1.5" if r != 1 else ","
            friends = "0.250000,4,20" if job.job.method.rule == "fdms" else ",0,0"
            metrics.append(f"{prefix},{r},{10 * (r + 1)},10,{evaluated},{friends}")
            timings.append(f"{prefix},{r},0.5,0.002,0.1")
        (job.path / "metrics.csv").write_text("\n".join(metrics) + "\n")
        (job.path / "timings.csv").write_text("\n".join(timings) + "\n")
        (job.path / "done.json").write_text("{}")
        if job.job.method.rule == "fdms":
            rows = ["client,group,0,1,2,3", "0,0,,0.9,0.3,0.4", "1,0,0.9,,,0.2"]
            rows += ["2,1,0.3,,,0.8", "3,1,0.4,0.2,0.8,"]
            (job.path / "scores.csv").write_text("\n".join(rows) + "\n")
    folder.merge()
    return folder


def test_a_job_file_without_newer_settings_is_still_of_the_same_job(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path, CONFIG)
    folder.prepare()
    (job, *_) = folder.job_folders()
    job.prepare()
    file = job.path / "job.json"
    content = json.loads(file.read_text())
    del content["method"]["gradient_units"]  # as an older version, without that setting, wrote it
    file.write_text(json.dumps(content))
    job.prepare()
    content["method"]["gradient_units"] = True
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="gradient_units"):
        job.prepare()


def test_a_second_run_in_one_folder_is_refused_and_told_who_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastagg_sim.report.check", lambda config: None)
    first, second = (ResultsFolder(tmp_path / "out", CONFIG) for _ in range(2))
    with first.held():
        said = rf"another run uses this folder: process {os.getpid()} on .*choose another --out"
        with pytest.raises(ConfigError, match=said), second.held():
            pass
        with pytest.raises(ConfigError, match=said):
            compute([(tmp_path / "out", CONFIG)])
    with second.held():
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".running"]
    assert not list((tmp_path / "out").iterdir())


def test_merge_keeps_the_order_of_the_config(tmp_path: Path) -> None:
    fake_results(tmp_path)
    curves = read_curves(tmp_path / "metrics.csv")
    assert [job_key(c.method, c.dropout, c.seed) for c in curves] == [
        job.key for job in CONFIG.jobs()
    ]
    full = curves[0]
    assert (full.rounds, full.uploads) == ([0, 2], [10, 30])  # round 1 was not evaluated
    assert full.after(3) == pytest.approx(0.4)
    assert full.after(2) is None
    assert full.last(1) == pytest.approx(0.4)
    assert full.last() == pytest.approx(0.3)
    assert curves[1].wrong_friends == [(0.25, 4)] * 3  # also of the round without evaluation


def test_config_json_repeats_the_run(tmp_path: Path) -> None:
    fake_results(tmp_path)
    assert read_config(tmp_path / "config.json") == CONFIG
    with pytest.raises(ConfigError, match="found none"):
        read_config(tmp_path / "other.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="expected JSON"):
        read_config(tmp_path / "bad.json")


@pytest.mark.parametrize("content", [b"\x89PNG\r\n", b"{", b"[" * 100_000])
def test_a_configuration_that_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json: expected JSON"):
        read_config(tmp_path / "config.json")


JOB_FILE = "jobs/Full_full_seed0/job.json"


@pytest.mark.parametrize("name", [JOB_FILE, "reused.json"])
@pytest.mark.parametrize("content", [b"", b'{"task":', b"\x89PNG\r\n", b"[" * 100_000])
def test_files_of_a_folder_that_are_no_json_are_refused(
    name: str, content: bytes, tmp_path: Path
) -> None:
    folder = fake_results(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}: expected JSON: "):
        folder.prepare()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (JOB_FILE, "[]", "job: expected an object, got []"),
        (JOB_FILE, "{}", "job: the keys ['dropout', 'method', 'seed', 'task'] are missing"),
        ("reused.json", "[]", "expected a folder by the key of a job, got []"),
    ],
)
def test_files_of_a_folder_of_another_form_are_refused(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    folder = fake_results(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / name}: {message}")):
        folder.prepare()


@pytest.mark.parametrize("name", [JOB_FILE, "reused.json"])
def test_a_run_into_a_damaged_folder_ends_with_2(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("fastagg_sim.report.check", lambda config: None)
    fake_results(tmp_path)
    (tmp_path / name).write_text('{"task":')
    assert main(["run", "--config", str(tmp_path / "config.json"), "--out", str(tmp_path)]) == 2
    assert f"error: {tmp_path / name}: expected JSON" in capsys.readouterr().err


def test_folder_of_another_configuration_is_refused(tmp_path: Path) -> None:
    fake_results(tmp_path)
    task = dataclasses.replace(CONFIG.task, rounds=4)
    other = dataclasses.replace(CONFIG, task=task)
    with pytest.raises(ConfigError, match=r"rounds was 3, now 4.*another --out"):
        ResultsFolder(tmp_path, other).prepare()
    changed = (CONFIG.methods[0], Method("FDMS", "fdms", {"similarity": "distance"}))
    with pytest.raises(ConfigError, match="similarity was None, now 'distance'"):
        ResultsFolder(tmp_path, dataclasses.replace(CONFIG, methods=changed)).prepare()
    with pytest.raises(ConfigError, match=r"leaves out .*seed1"):
        ResultsFolder(tmp_path, dataclasses.replace(CONFIG, seeds=(0,))).prepare()
    ResultsFolder(tmp_path, dataclasses.replace(CONFIG, seeds=(0, 1, 2))).prepare()  # may grow
    assert read_config(tmp_path / "config.json").seeds == (0, 1, 2)


def test_jobs_that_are_left_out_are_named_in_part(tmp_path: Path) -> None:
    fake_results(tmp_path, dataclasses.replace(CONFIG, seeds=tuple(range(20))))
    with pytest.raises(ConfigError) as refused:
        ResultsFolder(tmp_path, dataclasses.replace(CONFIG, seeds=(0,))).prepare()
    assert str(refused.value).count("_seed") == 3 and " and 54 more" in str(refused.value)


def test_a_configuration_that_means_the_same_is_not_written_again(tmp_path: Path) -> None:
    folder = fake_results(tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    del content["task"]["max_seconds"]  # as an older version, without that setting, wrote it
    file.write_text(json.dumps(content))
    folder.prepare()
    assert json.loads(file.read_text()) == content
    ResultsFolder(tmp_path, dataclasses.replace(CONFIG, name="other")).prepare()
    assert read_config(file).name == "other"


def test_table_has_means_over_seeds(tmp_path: Path) -> None:
    grid = summary(fake_results(tmp_path))
    rows = [dict(zip(grid.columns, row, strict=True)) for row in grid.rows]
    assert [(row["dropout"], row["method"]) for row in rows] == [
        ("full", "Full"),
        ("exact-0.5", "FDMS"),
        ("exact-0.7", "FDMS"),
    ]
    assert rows[0]["final"] == "0.405"
    assert rows[0]["last 10"] == "0.305 ± 0.007"
    assert rows[0]["wrong"] == ""
    assert rows[1]["wrong"] == "25.0 %"
    assert rows[1]["agg ms"] == "2.00"
    assert grid.to_markdown().count("\n") == 2 + 2 + 3 + 2


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_table_shows_all_numbers_at_any_width(width: int, terminal: bool) -> None:
    label = "mifa-memory-dtype=bfloat16-nonfinite=drop"
    rows = [("exact-0.5", label, "0.312 ± 0.026", "44.5"), ("full", "[a]", "1.000", "6.1")]
    grid = Grid("A title", ("dropout", "method", "last 10", "seconds"), rows, "A note.")
    file = io.StringIO()
    grid.show(Console(file=file, width=width, force_terminal=terminal, color_system=None))
    text = file.getvalue()
    for cell in ("last 10", "seconds", "0.312 ± 0.026", "44.5", "[a]", "6.1", "exact-0.5"):
        assert cell in text
    assert "…" not in text
    assert (label in text) == (not terminal or width != 60)  # where the name is folded
    if terminal and width > 40:  # the numbers alone are wider than that
        assert max(map(len, text.splitlines())) <= width


def timed(method: str, seed: int, time: list[float], accuracy: list[float]) -> Curve:
    rounds = list(range(len(time)))
    return Curve(method, "fedavg", "x", seed, rounds, rounds, accuracy, time=time)


def test_time_to_a_target() -> None:
    first = timed("a", 0, [10.0, 20.0, 35.0], [0.2, 0.6, 0.5])
    assert [first.time_to(target) for target in (0.1, 0.5, 0.6, 0.7)] == [10.0, 20.0, 20.0, None]
    second = timed("a", 1, [12.0, 30.0], [0.2, 0.4])
    assert [time_to([first, second], target) for target in (0.1, 0.4, 0.6, 0.9)] == [
        *("11", "25", "20 (1 of 2)", "")
    ]
    # Nine tenths of the best mean of the last evaluations: 0.9 * 1.3 / 3 = 0.39
    assert time_target([first, second]) == 0.39
    assert time_target([first, Curve("b", "fedavg", "x", 0, [0], [1], [0.5])]) is None
    assert Curve("b", "fedavg", "x", 0, [0], [1], [0.5]).time_to(0.1) is None


@pytest.mark.slow
def test_a_table_and_a_figure_of_simulated_time(tmp_path: Path) -> None:
    task = dataclasses.replace(CONFIG.task, latency=Latency("pareto"))
    folder = fake_results(tmp_path, dataclasses.replace(CONFIG, task=task))
    for job in folder.job_folders():
        header, *rows = (job.path / "metrics.csv").read_text().splitlines()
        times = [f"{row},{(t + 1) * (10 + job.job.seed)},1,0.5" for t, row in enumerate(rows)]
        (job.path / "metrics.csv").write_text("\n".join([f"{header},time,late,age", *times]) + "\n")
    folder.merge()
    grid = summary(folder)
    # The best mean of the last evaluations is that of Full with seed 1: (0.21 + 0.41) / 2 = 0.31.
    assert grid.columns[-2:] == ("seconds", "to 0.27") and "simulated" in grid.note
    rows = {row[:2]: row[-2:] for row in grid.rows}
    assert rows["full", "Full"] == ("31.5", "31.5")
    assert rows["exact-0.5", "FDMS"] == ("31.5", "")
    paths = plot_folder(tmp_path)
    assert [path.name for path in paths] == ["accuracy.png", "time.png", "similarity.png"]
    assert "simulated seconds" in paths[1].with_suffix(".svg").read_text()


def test_the_title_states_the_time_that_was_reached(tmp_path: Path) -> None:
    task = dataclasses.replace(CONFIG.task, latency=Latency("pareto"), max_seconds=40.0)
    folder = fake_results(tmp_path, dataclasses.replace(CONFIG, task=task))
    written = {job.path: (job.path / "metrics.csv").read_text() for job in folder.job_folders()}

    def title(first: float, other: float) -> str:
        """Return the title if the first run ends at one time and all others at another one."""
        for path, text in written.items():
            end = first if path == next(iter(written)) else other
            header, *rows = text.splitlines()
            times = [f"{row},{end * (t + 1) / 3:.6g},1,0.5" for t, row in enumerate(rows)]
            lines = [f"{header},time,late,age", *times]
            (path / "metrics.csv").write_text("\n".join(lines) + "\n")
        folder.merge()
        return summary(folder).title

    assert "after 40 simulated seconds, 2 seeds" in title(40.5, 43.0)
    assert "after 3 rounds or 40 simulated seconds (reached: 36 to 43), 2 s" in title(36.0, 43.0)
    assert "after 3 rounds or 40 simulated seconds (reached: 36), 2 seeds" in title(36.0, 36.0)


@pytest.mark.slow
def test_figures_need_only_the_csv_files(tmp_path: Path) -> None:
    fake_results(tmp_path)
    (tmp_path / "config.json").unlink()
    paths = plot_folder(tmp_path)
    assert [path.name for path in paths] == ["accuracy.png", "similarity.png"]
    for path in paths:
        with Image.open(path) as image:
            assert image.width > 600 and image.height > 400
            colors = image.convert("RGB").getcolors(maxcolors=1 << 20)
            assert colors is not None and len(colors) > 50
    with pytest.raises(ConfigError, match=r"metrics\.csv"):
        plot_folder(tmp_path / "nothing")


def test_scores_are_read_with_gaps(tmp_path: Path) -> None:
    fake_results(tmp_path)
    scores = read_scores(tmp_path / "jobs" / "FDMS_exact-0.5_seed0" / "scores.csv")
    assert scores.groups == [0, 0, 1, 1]
    assert np.isnan(scores.matrix[1, 2]) and np.isnan(np.diag(scores.matrix)).all()
    np.testing.assert_allclose(sorted(scores.intra()), [0.8, 0.8, 0.9, 0.9])
    np.testing.assert_allclose(sorted(scores.inter()), [0.2, 0.2, 0.3, 0.3, 0.4, 0.4])
    with pytest.raises(ValueError, match="groups"):
        Scores(scores.matrix, None).intra()


def without_job_files(folder: ResultsFolder) -> dict[str, bytes]:
    """Delete what is not committed of a results folder; return the merged files."""
    for file in folder.path.glob("jobs/*/*"):
        if file.name != "scores.csv":
            file.unlink()
    return {f.name: f.read_bytes() for f in folder.path.glob("*.csv")}


def test_jobs_are_restored_from_the_merged_files(tmp_path: Path) -> None:
    before = without_job_files(fake_results(tmp_path))
    more = ResultsFolder(tmp_path, dataclasses.replace(CONFIG, seeds=(0, 1, 2)))
    more.prepare()
    jobs = more.job_folders()
    assert [job.job.key for job in jobs if not job.finished] == [
        job.job.key for job in jobs if job.job.seed == 2
    ]
    assert json.loads((jobs[0].path / "done.json").read_text()) == {"rounds": 3}
    more.merge()
    assert {f.name: f.read_bytes() for f in tmp_path.glob("*.csv")} == before


def test_a_job_without_its_scores_is_computed_again(tmp_path: Path) -> None:
    folder = fake_results(tmp_path)
    without_job_files(folder)
    for file in tmp_path.glob("jobs/*/scores.csv"):
        file.unlink()
    folder.prepare()
    assert {job.job.method.rule for job in folder.job_folders() if job.finished} == {"fedavg"}


def test_a_job_that_has_a_checkpoint_is_not_restored(tmp_path: Path) -> None:
    folder = fake_results(tmp_path)
    without_job_files(folder)
    job = folder.job_folders()[0]
    (job.path / "checkpoint" / "round-00000001").mkdir(parents=True)
    folder.prepare()
    assert [f.job.key for f in folder.job_folders() if not f.finished] == [job.job.key]
    assert not (job.path / "metrics.csv").exists()


def test_merged_files_with_missing_rows_are_an_error_and_nothing_is_restored(
    tmp_path: Path,
) -> None:
    folder = fake_results(tmp_path)
    without_job_files(folder)
    for name in ("metrics.csv", "timings.csv"):
        whole = (tmp_path / name).read_text()
        (tmp_path / name).write_text("".join(whole.splitlines(keepends=True)[:-1]))
        with pytest.raises(ConfigError, match=f"{name}: expected 3 rows of a finished job"):
            folder.prepare()
        assert not any(job.finished for job in folder.job_folders())
        (tmp_path / name).write_text(whole)


def test_a_method_with_other_options_is_not_restored(tmp_path: Path) -> None:
    folder = fake_results(tmp_path)
    without_job_files(folder)
    methods = (CONFIG.methods[0], dataclasses.replace(CONFIG.methods[1], options={"floor": 0.5}))
    other = ResultsFolder(tmp_path, dataclasses.replace(CONFIG, methods=methods))
    with pytest.raises(ConfigError, match=r"method\.options\.floor was None, now 0\.5"):
        other.prepare()


def test_an_interrupted_run_merges_its_finished_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fake_results(tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.glob("*.csv")}
    for file in tmp_path.glob("*.csv"):
        file.unlink()

    def interrupted(*_: object, **__: object) -> None:
        raise Interrupted

    monkeypatch.setattr(report, "check", lambda _: None)  # this configuration cannot be trained
    monkeypatch.setattr(report, "run_jobs", interrupted)
    with pytest.raises(Interrupted):
        compute([(tmp_path, CONFIG)])
    assert {f.name: f.read_bytes() for f in folder.path.glob("*.csv")} == before


def test_jobs_with_the_same_settings_are_reused(tmp_path: Path) -> None:
    source = tmp_path / "results" / "other"
    before = without_job_files(fake_results(source))
    config = dataclasses.replace(CONFIG, name="more", seeds=(1, 0, 2))
    folder = ResultsFolder(tmp_path / "new", config)
    folder.prepare([tmp_path / "results"])
    jobs = folder.job_folders()
    taken = {job.job.key for job in jobs if job.job.seed != 2}
    assert {job.job.key for job in jobs if job.finished} == taken
    assert json.loads((folder.path / "reused.json").read_text()) == {
        key: source.as_posix() for key in taken
    }
    for job in jobs:
        if job.finished and job.job.method.rule == "fdms":
            there = source / "jobs" / job.job.key / "scores.csv"
            assert (job.path / "scores.csv").read_bytes() == there.read_bytes()
    folder.merge()
    rows = {f.name: sorted(f.read_bytes().splitlines()) for f in folder.path.glob("*.csv")}
    assert rows == {name: sorted(text.splitlines()) for name, text in before.items()}
    folder.prepare([tmp_path])  # the folder itself is no source, and nothing is left to take
    assert {job.job.key for job in jobs if job.finished} == taken


def test_jobs_of_another_task_or_without_scores_are_not_reused(tmp_path: Path) -> None:
    source = tmp_path / "other"
    without_job_files(fake_results(source))
    longer = dataclasses.replace(CONFIG, task=dataclasses.replace(CONFIG.task, rounds=4))
    folder = ResultsFolder(tmp_path / "longer", longer)
    folder.prepare([source])
    assert not any(job.finished for job in folder.job_folders())
    assert not (folder.path / "reused.json").exists()
    for file in source.glob("jobs/*/scores.csv"):
        file.unlink()
    folder = ResultsFolder(tmp_path / "same", CONFIG)
    folder.prepare([source])
    assert {job.job.method.rule for job in folder.job_folders() if job.finished} == {"fedavg"}


def test_a_folder_without_results_cannot_be_reused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--reuse: expected a folder with results"):
        ResultsFolder(tmp_path / "new", CONFIG).prepare([tmp_path / "nothing"])
    (tmp_path / "config.json").write_text("{")
    for reuse in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError):
            compute([(tmp_path / "new", CONFIG)], reuse=[reuse])
    assert not (tmp_path / "new").exists()


# --- damaged files ----------------------------------------------------------------------------

HEADER = ",".join(JOB_COLUMNS + METRIC_COLUMNS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: expected a header with method, rule, "),
        (HEADER, "expected the rows of finished jobs, found none"),
        (HEADER.replace("accuracy", "loss"), "line 1: expected a header with accuracy"),
        (f"{HEADER}\nA,fedavg,full,0,0,10,10,0.5,1", "line 2: expected 12 cells"),
        (f"{HEADER}\nA,fedavg,full,0,0,10,10,x,1,,0,0", "line 2: expected numbers: .*'x'"),
        (f"{HEADER}\nA,fedavg,full,x,0,10,10,0.5,1,,0,0", "line 2: expected numbers: .*'x'"),
        (f"{HEADER}\nA,fedavg,full,0,0,10,10,,,,0,0", "A .* seed 0: expected an accuracy"),
        ("\xff\xfe", "expected a CSV file"),
    ],
)
def test_metrics_that_cannot_be_drawn_are_one_clear_error(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "metrics.csv").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"metrics\.csv.*{message}"):
        plot_folder(tmp_path)
    assert not (tmp_path / "accuracy.png").exists()


@pytest.mark.parametrize("column", ["time", "train_loss"])
def test_values_beside_accuracies_are_complete(column: str, tmp_path: Path) -> None:
    rows = [f"A,fedavg,full,0,{t},10,10,0.5,1,,0,0,{value}" for t, value in enumerate(["1.5", ""])]
    (tmp_path / "metrics.csv").write_text("\n".join([f"{HEADER},{column}", *rows]))
    with pytest.raises(ConfigError, match=f"expected a {column} beside every accuracy"):
        read_curves(tmp_path / "metrics.csv")


@pytest.mark.parametrize("content", ["", "client,group,0,1", "client,group,0,1\n0,0,,0.5", "a\nb"])
def test_damaged_scores_are_one_clear_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text(content)
    with pytest.raises(ConfigError, match=r"scores\.csv: expected a group and K scores"):
        read_scores(tmp_path / "scores.csv")


# --- files that jobs read ---------------------------------------------------------------------


def trace_config(path: Path, rounds: int = 3) -> Config:
    """A configuration whose dropout setting is a trace of `rounds` rounds, written to `path`."""
    write_trace(path, [[0, 1]] * rounds)
    return dataclasses.replace(CONFIG, dropouts=(Dropout("trace", {"path": str(path)}),))


def refuses(folder: ResultsFolder, path: Path) -> None:
    said = rf"inputs.json: the folder belongs to another conf.*sha256.{path} was '\w{{16}}', now '"
    with pytest.raises(ConfigError, match=said):
        folder.prepare()


def test_a_folder_belongs_to_the_content_of_the_files_that_its_jobs_read(tmp_path: Path) -> None:
    path, later = tmp_path / "t.csv", tmp_path / "later.csv"
    config = trace_config(path)
    folder = fake_results(tmp_path / "out", config)
    folder.prepare()  # nothing has changed
    written = (folder.path / "inputs.json").read_bytes()
    assert [*json.loads(written)] == [str(path)]
    more = dataclasses.replace(config, dropouts=config.dropouts + trace_config(later).dropouts)
    folder = ResultsFolder(folder.path, more)
    folder.prepare()
    assert [*json.loads((folder.path / "inputs.json").read_text())] == [str(later), str(path)]
    trace_config(later, rounds=4)
    refuses(folder, later)  # its job has not been computed
    trace_config(later)
    trace_config(path, rounds=4)
    refuses(folder, path)
    without_job_files(folder)
    refuses(folder, path)  # nor are its jobs restored from the merged files
    path.unlink()
    with pytest.raises(ConfigError, match=f"cannot read {path}: No such file"):
        folder.prepare()


def test_a_folder_without_the_content_of_its_files_is_accepted(tmp_path: Path) -> None:
    """As earlier versions wrote it. It is kept from then on."""
    path = tmp_path / "t.csv"
    folder = fake_results(tmp_path / "out", trace_config(path))
    (folder.path / "inputs.json").unlink()
    trace_config(path, rounds=4)
    folder.prepare()
    assert all(job.finished for job in folder.job_folders())
    trace_config(path, rounds=5)
    refuses(folder, path)
    (folder.path / "inputs.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"inputs\.json: expected a digest by path"):
        folder.prepare()


def test_without_files_nothing_is_written(tmp_path: Path) -> None:
    folder = fake_results(tmp_path)
    assert not (tmp_path / "inputs.json").exists()
    (job, *_) = folder.job_folders()
    assert (job.path / "job.json").read_text() == to_json(job.job)
    assert (tmp_path / "config.json").read_text() == CONFIG.to_json()


@pytest.mark.parametrize("content", ["same", "other", "not known"])
def test_jobs_that_read_other_content_are_not_reused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    config = trace_config(path)
    source = fake_results(tmp_path / "source", config).path
    if content != "same":
        trace_config(path, rounds=4)
    if content == "not known":  # results of an earlier version
        (source / "inputs.json").unlink()
    folder = ResultsFolder(tmp_path / "new", config)
    folder.prepare([source])
    finished = [job.job.dropout.process for job in folder.job_folders() if job.finished]
    read = [] if content == "other" else ["trace"] * 2
    assert sorted(finished) == sorted(["full"] * 2 + read)  # "Full" reads no file


def test_files_of_jobs() -> None:
    def files(process: str, options: dict[str, Any], latency: Latency | None = None) -> list[str]:
        dropout = Dropout(process, options, {"1": {"after": "empty"}})
        task = dataclasses.replace(CONFIG.task, latency=latency)
        return input_files(Job(task, CONFIG.methods[1], dropout, 1))

    trace = {"path": "a.csv"}
    assert files("trace", trace) == ["a.csv"]
    assert files("exact", {}, Latency("trace", trace)) == ["a.csv"]
    assert files("trace", trace, Latency("trace", {"path": "b.csv"})) == ["a.csv", "b.csv"]
    nested = {"process": "sampled", "options": {"process": "trace", "options": trace}}
    assert files("churn", nested) == ["a.csv"]
    assert files("adversarial", {"candidates": "c.csv"}) == ["c.csv"]
    assert files("adversarial", {"candidates": "all"}) == []
    assert files("adversarial", {"candidates": [1, 2]}) == []
    assert files("exact", trace) == files("unknown", trace) == []
    job = Job(CONFIG.task, CONFIG.methods[1], Dropout("trace", {}, {"1": trace}), 1)
    assert input_files(job) == ["a.csv"]
