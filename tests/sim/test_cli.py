# SPDX-License-Identifier: Apache-2.0
"""The command line, run in this process where possible."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from fastagg_sim import __main__, experiments
from fastagg_sim.cli import main
from fastagg_sim.config import ConfigError, LocalTraining, Task
from fastagg_sim.dropout.trace import write_trace
from fastagg_sim.experiments import mimic_fig7
from fastagg_sim.latency.trace import write_trace as write_latencies
from fastagg_sim.report import check
from fastagg_sim.results import read_config
from fastagg_sim.run_options import RunOptions

TINY = (
    *("run", "--rounds", "3", "--model", "logistic", "--num-clients", "10"),
    *("--partition-options", "samples_per_client=20", "--workers", "2"),
)


LISTS = ("--rules", "--dropout", "--alphas", "--seeds")


@pytest.mark.slow
def test_run_writes_everything_and_can_be_repeated_from_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "first"
    arguments = [*TINY, "--rules", "fedavg", "fdms:similarity=distance", "--with-full"]
    arguments += ["--dropout", "exact", "bernoulli", "--out", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    assert names == {
        *("config.json", "versions.json", "jobs", "metrics.csv", "timings.csv"),
        *("table.md", "accuracy.png", "accuracy.svg", "similarity.png", "similarity.svg"),
    }
    assert "accuracy.png" in printed and "fdms-similarity=distance" in printed
    assert len(list((out / "jobs").iterdir())) == 1 + 2 * 2
    assert "torch" in json.loads((out / "versions.json").read_text())

    again = tmp_path / "again"
    assert main(["run", "--config", str(out / "config.json"), "--out", str(again)]) == 0
    assert (again / "metrics.csv").read_bytes() == (out / "metrics.csv").read_bytes()

    drawn = (out / "accuracy.svg").read_bytes()
    (out / "accuracy.png").unlink()
    assert main(["plot", str(out)]) == 0
    assert (out / "accuracy.png").exists()
    assert (out / "accuracy.svg").read_bytes() == drawn  # no date, no random ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rules", "fedag"], "Did you mean 'fedavg'"),
        (["--dataset", "imagenet"], "--dataset: unknown data set 'imagenet'; there are: cifar10"),
        (["--dataset", "minst"], "Did you mean 'mnist' or 'fmnist'?"),
        (["--model", "lenet5"], "--model: unknown model 'lenet5'"),
        (["--partition", "shard"], "--partition: unknown partition 'shard'"),
        (["--rules", "fedavg", "nope"], "--rules: unknown rule 'nope'"),
        (["--dropout", "sometimes"], "--dropout: unknown dropout process"),
        (["--dropout", "round-robin:tau=3"], "'tau'"),
        (["--dropout", "round-robin:tau_max"], "dropout: expected KEY=VALUE, got 'tau_max'"),
        (["--dropout", "trace:path=none.csv"], "cannot read none.csv"),
        (["--dropout", "sampled:sample=5,process=never"], "unknown dropout process 'never'"),
        (["--dropout", "bernoulli:p=[0.1,0.5]"], "p"),
        (["--data-options", "normalize=no"], "normalize"),
        (["--alphas", "1.5"], "alpha"),
        (["--alphas", "0.5", "0.7", "0.5"], "--alphas: expected each value once, got 0.5 again"),
        *(([option], f"{option}: expected at least one value") for option in LISTS),
        (["--rules", "fedavg", "fedavg"], "--rules: expected each value once, got fedavg again"),
        (["--dropout", "full", "full"], "--dropout: expected each setting once, got full again"),
        (["--dropout", "exact", "exact:alpha=0.5"], "got exact-0.5 again from 'exact:alpha=0.5'"),
        (["--seeds", "1", "1"], "--seeds: expected each value once, got 1 again"),
        (["--reuse", "nowhere"], "--reuse: expected a folder with results, got nowhere"),
        (["--rules", "fdms:similar"], "expected KEY=VALUE"),
        (["--rules", "fdms:unknown=1"], "error: --rules: fdms has no option unknown; it has clie"),
        (["--rules", "fdms-means:similarity=cosine"], "so it is always the cosine"),
        (["--rules", "fdms-soft:elimination=5"], "elimination: use the rule fdms"),
        (["--rules", "fedawe:et=1"], "fedawe has no option et; it has eta, client_weights"),
        (["--rules", "fedawe:eta=much"], "expected a number as eta, got 'much'"),
        (["--rules", "fedawe:eta=-1"], "echo: expected a finite number >= 0"),
        (["--local-epochs", "1", "--local-steps", "1"], "exactly one"),
        (["--partition-options", "num_groups=3"], "num_groups"),
        (["--schedule", "deadline:seconds=3"], "--schedule: needs --latency"),
        (["--max-seconds", "3"], "--max-seconds: needs --latency"),
        (["--latency", "slow"], "--latency: unknown latency process 'slow'"),
        (["--latency", "pareto:shape=0"], "shape: expected a number between 0.1 and 100, got 0"),
        (["--latency", "pareto", "--schedule", "late"], "--schedule: unknown schedule 'late'"),
        (["--latency", "pareto", "--schedule", "deadline:seconds=-1"], "seconds: expected a numb"),
        (["--latency", "pareto", "--max-seconds", "-1"], "max_seconds: expected a finite number"),
        (["--min-active", "3", "--dropout", "churn:initial=2"], "min_active: expected at most 2"),
        (["--rules", "krum:num_byzantine=1", "--dropout", "churn"], "starts with 1 of 20 clients"),
        (["--dropout", "exact:alpha=half"], "alpha: expected a number, got 'half'"),
        (["--dropout", "markov:memory=x"], "memory: expected a number, got 'x'"),
        (["--dropout", "adversarial:candidates=5"], "candidates: expected "),
        (["--rules", "fedavg:server_lr=0.5"], "server_lr for the rule 'fedavg'; --server-lr"),
        (["--rules", "mifa:device=cpu"], "--device"),
        (["--rules", "scaffold:local_work=3"], "local_work for the rule 'scaffold'; local train"),
        (["--max-uploads", "0"], "max_uploads: expected at least 1, or none, got 0"),
        (["--batch-size", "0"], "batch_size: expected at least 1, got 0"),
        (["--batch-size", f"{1 << 63}"], "batch_size: expected at most 2^63 - 1"),
        (["--batch-size", "0", "--dataset", "mnist"], "batch_size: expected at least 1, got 0"),
        (["--prox", "inf"], "prox: expected a finite number >= 0, got inf"),
        (["--workers", "0"], "workers: expected at least 1"),
        (["--workers", "-1"], "workers: expected at least 1"),
        (["--checkpoint-seconds", "nan"], "checkpoint_seconds: expected seconds of at least 0"),
        (["--checkpoint-seconds", "-1"], "checkpoint_seconds: expected seconds of at least 0"),
        (["--rules", "fdms:sketch=8,sketch=9"], "expected each key once, got 'sketch' again"),
        (["--config", "nowhere.json"], "found none"),
        (["--config", "nowhere.json", "--lr", "0.5"], "cannot be combined with --lr"),
        (["--config", "nowhere.json", "--rounds", "50"], "cannot be combined with --rounds"),
        (["--config", "nowhere.json", "--rounds=50"], "cannot be combined with --rounds"),
        (["--config", "nowhere.json", "--batch_size", "10"], "combined with --batch-size"),
        (["--config", "nowhere.json", "--with-full", "--dropout", "exact"], "--with-full, --drop"),
    ],
)
def test_wrong_usage_is_one_clear_error(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "dropout", ["trace:path=t.csv", 'sampled:sample=3,process=trace,options={"path":"t.csv"}']
)
def test_a_trace_of_dropout_is_as_long_as_the_run(
    dropout: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace("t.csv", [[0, 1]] * 4)
    arguments = ["run", "--rules", "fedavg", "--dropout", dropout, "--out", "out", "--rounds"]
    assert main([*arguments, "8"]) == 2
    error = capsys.readouterr().err
    for part in ("--dropout", "4 rounds", "--rounds is 8", "after=repeat or after=empty"):
        assert part in error
    assert error.count("\n") == 1 and not Path("out").exists()
    check(RunOptions(rounds=4, dropout=(dropout,)).build())
    check(RunOptions(rounds=8, dropout=("trace:path=t.csv,after=empty",)).build())
    limited = RunOptions(rounds=8, dropout=(dropout,)).build()
    check(dataclasses.replace(limited, task=dataclasses.replace(limited.task, max_uploads=8)))


def test_a_trace_of_latencies_has_all_that_the_run_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    times = [(t, k, 1.5) for t in range(4) for k in range(19)]
    write_latencies("l.csv", times)
    arguments = ["run", "--rules", "fedavg", "--latency", "trace:path=l.csv", "--out", "out"]
    assert main([*arguments, "--dropout", "full", "--rounds", "4"]) == 2
    assert "--latency: path: l.csv: expected a latency of client 19 in round 0" in (
        capsys.readouterr().err
    )
    write_trace("t.csv", [range(19)] * 8)  # without the client that has no latency
    arguments += ["--dropout", "trace:path=t.csv"]
    assert main([*arguments, "--rounds", "8"]) == 2
    assert "--latency: round: l.csv has rounds 0 to 3, got 4" in capsys.readouterr().err
    assert not Path("out").exists()
    absent = RunOptions(rounds=4, dropout=("trace:path=t.csv",), latency="trace:path=l.csv")
    check(absent.build())
    check(dataclasses.replace(absent, rounds=8, max_seconds=6.0).build())  # four rounds
    limited = dataclasses.replace(absent, rounds=8).build()
    check(dataclasses.replace(limited, task=dataclasses.replace(limited.task, max_uploads=76)))


def test_runs_with_other_options_have_other_folders() -> None:
    names = [RunOptions(lr=lr).build().name for lr in (0.1, 0.1, 0.2)]
    assert names[0] == names[1] != names[2] and names[0].startswith("digits-")
    assert RunOptions(name="mine").build().name == "mine"


@pytest.mark.parametrize("name", ["../x", "/elsewhere", "a/b", "", ".", ".."])
def test_a_name_is_that_of_a_folder_in_results(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["run", "--rounds", "1", "--name", name]) == 2
    assert f"--name: expected the name of a folder in results, got {name!r}" in (
        capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_claims_of_no_folder_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "no-folder"]) == 2
    assert "claims no-folder: expected a folder" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["nan", "-0.1", "2"])
def test_a_limit_of_a_share_is_a_fraction(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timings", "results", "--limit", limit]) == 2
    assert "--limit: expected a fraction in [0, 1]" in capsys.readouterr().err


def test_quick_results_have_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["experiment", "adversarial-fig8", "--quick"]) in (0, 3)
    assert [path.name for path in Path("results").iterdir()] == ["quick"]
    assert Path("results/quick/adversarial-fig8/claims.json").exists()


def test_a_folder_that_cannot_be_written_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for command in (["run"], ["experiment", "adversarial-fig8", "--quick"]):
        assert main([*command, "--out", str(tmp_path / "file" / "out")]) == 2
        error = capsys.readouterr().err
        assert error == f"error: {tmp_path / 'file' / 'out'}: Not a directory\n"


def test_ctrl_c_outside_of_jobs_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fastagg_sim.experiments._theorem4.run", interrupted)
    assert main(["experiment", "theorem4", "--quick", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "stopped"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert f"PyTorch {torch.__version__}" in capsys.readouterr().out


def test_a_missing_package_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "fastagg_sim.cli")
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert __main__.main() == 2
    assert "'tyro', which is not installed; pip install 'fastagg[sim]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["run", "--help"], ["--version"]])
def test_output_that_nobody_reads_is_no_traceback(arguments: list[str]) -> None:
    """As with `| head`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "fastagg_sim", *arguments]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    command = [sys.executable, "-m", "fastagg_sim", "list"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 2
    assert ended.stderr.decode() == "error: standard output: No space left on device\n"


def test_output_in_ascii_has_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(__main__, "_run", lambda: print("0.3 ± 0.1") or 0)
    assert __main__.main() == 0
    assert written.getvalue() == b"0.3 ? 0.1\n"


@pytest.mark.parametrize("module", ["fastagg", "fastagg_sim"])
def test_a_wrong_instruction_set_is_one_line(module: str) -> None:
    environment = {**os.environ, "FASTAGG_ISA": "foo"}
    command = [sys.executable, "-m", module]
    ended = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert ended.stderr.startswith(b"error: FASTAGG_ISA=foo: ") and ended.stderr.count(b"\n") == 1


def test_ctrl_c_during_imports_ends_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "fastagg_sim.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "fastagg_sim.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert __main__.main() == 130
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.slow
def test_progress_goes_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--rules", "fedavg", "--out", str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert "all jobs" in captured.err or "rounds" in captured.err
    assert "accuracy.png" in captured.out and "accuracy.png" not in captured.err


@pytest.mark.slow
def test_a_run_in_simulated_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = [*TINY, "--rounds", "60", "--dropout", "full", "--max-seconds", "45"]
    arguments += ["--latency", "classes:medians=[1.0,20.0],shares=[4,1],by=group"]
    arguments += ["--rules", "fedavg", "--with-full"]
    arguments += ["--schedule", "deadline:seconds=3", "over-selection:take=4,extra=2"]
    assert main([*arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "time.png" in printed and "seconds" in printed
    rows = [line.split(",") for line in (out / "metrics.csv").read_text().splitlines()]
    rounds = Counter(row[0] for row in rows[1:])
    # The last group is slow, two of ten clients: waiting for it takes most of the time.
    assert rounds["fedavg-deadline-seconds=3"] == 15
    assert rounds["fedavg-over-selection-take=4-extra=2"] > 15 > 4 > rounds["Full"]
    assert {"time.png", "time.svg"} <= {path.name for path in out.iterdir()}


def test_a_run_ends_after_a_number_of_uploads(tmp_path: Path) -> None:
    arguments = [*TINY, "--rules", "fedavg", "--dropout", "full", "--max-uploads", "11"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert len((tmp_path / "out" / "metrics.csv").read_text().splitlines()) == 1 + 2


def test_remedies_whose_clients_keep_something_run(tmp_path: Path) -> None:
    rules = ["fedawe", "fedawe:eta=0.5", "mifa-client", "fedstale:beta=0.3", "mimic:mode=client"]
    arguments = [*TINY, "--rules", *rules, "--dropout", "exact", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    methods = read_config(tmp_path / "out" / "config.json").methods
    assert [(method.label, method.rule, method.echo) for method in methods[:2]] == [
        ("fedawe", "fedavg", 1.0),
        ("fedawe-eta=0.5", "fedavg", 0.5),
    ]
    assert len((tmp_path / "out" / "metrics.csv").read_text().splitlines()) == 1 + 5 * 3


@pytest.mark.slow
def test_every_process_and_partition_runs(tmp_path: Path) -> None:
    trace = tmp_path / "who is there.csv"
    trace.write_text("round,client\n0,1\n0,2\n2,0\n")
    arguments = [*TINY[:-4], "--workers", "2", "--rules", "fedavg", "--partition", "dirichlet"]
    arguments += ["--partition-options", "alpha=0.3", "--out", str(tmp_path / "out"), "--dropout"]
    arguments += ["time-varying", "markov:memory=0.5", "round-robin:tau_max=3,phase=random"]
    arguments += ["label-correlated:pattern=cycle", f"trace:path={trace}", "bernoulli:p=0.3"]
    arguments += ['sampled:sample=5,process=bernoulli,options={"p": 0.5}']
    arguments += ["adversarial:candidates=[0,1,2],sample=6,epsilon=0.5"]
    arguments += ["sampled:sample=5,selection=longest-absent", "churn:initial=4,lifetime=5"]
    assert main(arguments) == 0
    lines = (tmp_path / "out" / "metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + 10 * 3
    uploads = [line.split(",") for line in lines if ",trace-" in line]
    header = lines[0].split(",")
    assert [row[header.index("active")] for row in uploads] == ["2", "0", "1"]


def test_missing_data_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTAGG_DATA", str(tmp_path / "empty"))
    arguments = ["experiment", "fdms-fig1-mnist", "--quick", "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "fastagg-sim data mnist" in capsys.readouterr().err


@pytest.mark.slow
def test_diverging_job_is_reported_and_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*TINY, "--rules", "fedavg", "--lr", "1e38", "--out", str(tmp_path / "out")]
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert "fedavg_exact-0.5_seed0" in captured.out
    assert "1 of 1 jobs failed" in captured.err


@pytest.mark.slow
def test_quick_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["demo", "--quick", "--alphas", "0.5", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert code in (
        0,
        3,
    )  # ten rounds with one seed may miss the claim; the output must then say so
    claims = json.loads((tmp_path / "claims.json").read_text())["claims"]
    assert (code == 3) == any(claim["verdict"] == "fails" for claim in claims)
    for name in ("accuracy.png", "similarity.png"):
        assert (tmp_path / name).exists() and name in printed


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert "elimination=null, precision=high" in printed  # of fdms
    assert "round-robin       tau_max=20, sampling=uniform" in printed
    assert "lognormal  median=1.0, sigma=0.5" in printed
    assert "deadline        seconds, late=lost" in printed
    assert "buffered        size, concurrency=null" in printed
    (common,) = (line for line in printed.splitlines() if line.startswith("  (every rule) "))
    assert "nonfinite=raise, max_norm=null" in common and "staleness=null" in common
    assert "buffer_size=null, staleness=polynomial" in printed  # of fedbuff
    assert "local_work" not in printed and "seed=0" not in printed
    assert "num_clients=" not in printed and "server_lr" not in printed
    names = ["fdms", "stale-models", "cluster-floor", "mnist-cnn", "shards", "fdms-fig3"]
    for name in (*names, "round-robin", "adversarial", "vgg11", "dirichlet", "label-limited"):
        assert name in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("  mimic-table5 "))
    assert line.split()[1:9] == ["MimiC", "table", "5", "20", "days", "4", "min", "30"]
    assert "GPU times (--device cuda) are estimates, not measurements; none: no estimate" in printed
    head, *rows = printed[printed.index("  name ") :].split("  Times are")[0].splitlines()
    starts = [head.index(name) for name in ("paper", "figure", "description")]
    assert len(rows) == len(experiments.available())
    assert all(row[start - 2 : start] == "  " for row in rows for start in starts)
    ours = ("demo", "friends-from-means", "friends-sketched", "memory-dtypes", "scale-friends")
    ours += ("late-fig1",)
    of_papers = [row for row in rows if not row.split()[0].startswith(ours)]
    assert all(row[start] != " " for row in of_papers for start in starts)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("theorem4", ["--eval-every", "2"]),
        ("theorem4", ["--workers", "1"]),
        ("adversarial-fig8", ["--rounds", "3"]),
        ("friends-fig1", ["--alphas", "0.5"]),
    ],
)
def test_options_that_have_no_effect_are_refused(
    name: str, given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experiment", name, "--quick", *given, "--out", str(tmp_path / "out")]) == 2
    assert f"{given[0]}: {name} does not use this option" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("theorem4", ["--epsilons"], "--epsilons: expected at least one value"),
        (
            "theorem4",
            ["--epsilons", "0.2", "1"],
            "--epsilons: expected multiples of 1/20",
        ),
        ("theorem4", ["--epsilons", "nan"], "--epsilons: expected multiples of 1/20"),
        (
            "theorem4",
            ["--reuse", "nowhere"],
            "--reuse: expected a folder with results, got nowhere",
        ),
        ("fdms-fig1-mnist", ["--alphas", "0.3", "0.3"], "--alphas: expected each value once"),
        ("fdms-fig1-mnist", ["--seeds", "0", "0"], "--seeds: expected each value once, got 0 0"),
        ("fdms-fig1-mnist", ["--eval-every", "0"], "--eval-every: expected at least 1, got 0"),
        ("late-fig1", ["--seconds", "0"], "--seconds: expected a finite number > 0, got 0.0"),
        ("late-fig1", ["--seconds", "nan"], "--seconds: expected a finite number > 0, got nan"),
        ("mimic-fig6", ["--p"], "--p: expected at least one value"),
        ("mimic-fig6", ["--p", "0.3", "0.1"], "--p: expected ascending values, got 0.3 0.1"),
        ("mimic-table3", ["--tau-max", "50", "20"], "--tau-max: expected ascending values"),
        ("mimic-table4-cifar", ["--percent", "30", "10"], "--percent: expected ascending values"),
        ("mimic-table5", ["--classes", "5", "2"], "--classes: expected ascending values"),
    ],
)
def test_wrong_options_of_an_experiment_are_one_clear_error(
    name: str,
    given: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["experiment", name, "--quick", *given, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command",
    [["demo"], ["experiment", "mimic-table4-fmnist"], ["experiment", "theorem4"]],
    ids=lambda words: words[-1],
)
def test_an_experiment_needs_a_round(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*command, "--quick", "--rounds", "0", "--out", str(out)]) == 2
    assert "--rounds: expected at least 1, got 0" in capsys.readouterr().err
    assert not out.exists()


def test_help_of_an_experiment_names_its_paper(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("mimic-fig7", "MimiC, figure 7: "), ("theorem4", "Su et al., theorem 4: ")):
        with pytest.raises(SystemExit):
            main(["experiment", name, "--help"])
        assert text in capsys.readouterr().out


@pytest.mark.slow
def test_an_experiment_writes_its_figure_table_and_claims(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Task("digits", "clustered", "logistic", LocalTraining(local_epochs=1), rounds=30)
    tiny = dataclasses.replace(
        tiny, partition_options={"samples_per_client": 20}, num_clients=10, max_uploads=20
    )
    monkeypatch.setattr(mimic_fig7, "fmnist", lambda options, uploads: tiny)
    assert main(["experiment", "mimic-fig7", "--seeds", "0", "--out", str(tmp_path)]) in (0, 3)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"figure.png", "figure.svg", "paper.md", "claims.json", "metrics.csv"} <= names
    assert "MimiC" in (tmp_path / "paper.md").read_text()
    claims = json.loads((tmp_path / "claims.json").read_text())["claims"]
    assert len(claims) == 7
    assert "p = 0.1: MimiC converges fastest" in " ".join(capsys.readouterr().out.split())


def test_data_of_a_shipped_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "digits"]) == 0
    assert main(["data", "imagenet"]) == 2
    assert "error: data: unknown data set 'imagenet'; there are:" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["run"], ["experiment"], ["experiment", "fdms-fig3"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    assert "fastagg-sim" in capsys.readouterr().out


def test_options_become_a_config() -> None:
    options = RunOptions(
        rules=("fdms:similarity=distance,elimination=theorem2", "mifa"),
        dropout=("full", "bernoulli"),
        alphas=(0.3, 0.7),
        local_steps=4,
    )
    config = options.build()
    assert config.methods[0].options == {"similarity": "distance", "elimination": "theorem2"}
    assert [d.label for d in config.dropouts] == ["full", "bernoulli-0.7", "bernoulli-0.3"]
    assert config.task.training.local_epochs is None
    assert config.task.partition_options == {"samples_per_client": 60}
    shards = RunOptions(partition="shards", partition_options=("num_shards=40",)).build()
    assert shards.task.partition_options == {"num_shards": 40}
    with pytest.raises(ConfigError, match="--dataset: unknown"):
        RunOptions(dataset="other").build()


def test_options_of_the_server_hold_for_all_rules() -> None:
    options = RunOptions(
        rules=("fedavg", "mifa:server_optimizer=yogi"),
        with_full=True,
        server_optimizer="adam:tau=1e-9,bias_correction=flower",
        min_active=3,
        clip_norm=2.0,
        noise_multiplier=0.5,
    )
    adam = {"name": "adam", "tau": 1e-9, "bias_correction": "flower"}
    full, fedavg, mifa = options.build().methods
    shared = {"min_active": 3, "clip_norm": 2.0, "noise_multiplier": 0.5}
    assert full.options == fedavg.options == {"server_optimizer": adam, **shared}
    assert mifa.options == {"server_optimizer": "yogi", **shared}
    assert RunOptions().build().methods[0].options == {}  # which keeps the names of earlier runs
    with pytest.raises(ConfigError, match=r"--server-optimizer: .*got 'adm'"):
        RunOptions(server_optimizer="adm").build()


@pytest.mark.parametrize("units", [False, True])
def test_full_has_the_units_of_the_rules_and_waits_for_all(units: bool) -> None:
    """With a server optimizer that has a state, other units are another method."""
    options = RunOptions(
        rules=("fedavg",),
        with_full=True,
        gradient_units=units,
        server_optimizer="adam",
        latency="lognormal",
        schedule=("deadline:seconds=3",),
    )
    full, fedavg = options.build().methods
    assert full.gradient_units is fedavg.gradient_units is units
    assert full.schedule is None and fedavg.schedule is not None


@pytest.mark.slow
def test_a_run_with_a_server_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*TINY, "--rules", "fedavg", "mifa", "--server-optimizer", "adam"]
    arguments += ["--server-lr", "0.05", "--min-active", "2", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    (config,) = (tmp_path / "out").rglob("config.json")
    assert '"server_optimizer": "adam"' in config.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_run_with_noise_is_repeatable(tmp_path: Path) -> None:
    arguments = [
        *TINY,
        "--rules",
        "fedavg",
        "fdms",
        "--clip-norm",
        "0.5",
        "--noise-multiplier",
        "0.2",
    ]
    found = []
    for name in ("a", "b"):
        assert main([*arguments, "--out", str(tmp_path / name)]) == 0
        tables = sorted((tmp_path / name).rglob("metrics.csv"))
        found.append([table.read_text(encoding="utf-8") for table in tables])
    assert found[0] == found[1] and found[0]


def test_clients_at_once_is_written_out_and_can_be_forced() -> None:
    assert RunOptions(batch_size=20).build().task.training.clients_at_once == 102
    assert RunOptions(clients_at_once=3).build().task.training.clients_at_once == 3
    mnist = RunOptions(dataset="mnist", batch_size=5)
    assert mnist.build().task.training.clients_at_once == 40


def test_rules_that_draw_random_numbers_follow_the_seed() -> None:
    rules = ("fedavg", "fdms", "fdms:sketch=64", "fdms-means", "fdms-means:seed=3", "bucketing")
    methods = RunOptions(rules=rules).build().methods
    assert [m.seeded for m in methods] == [False, False, True, True, False, True]


def test_rules_that_draw_random_numbers_inside_others_follow_the_seed() -> None:
    rules = (
        *("nnm", "nnm:rule=bucketing", 'nnm:rule=bucketing,rule_options={"seed": 3}'),
        *("nnm:rule=krum", "bucketing:seed=1", "bucketing:seed=1,rule=bucketing"),
        *("nnm:rule=nnm", 'nnm:rule=nnm,rule_options={"rule": "bucketing"}'),
    )
    methods = RunOptions(rules=rules).build().methods
    expected = [False, True, False, False, False, True, False, True]
    assert [m.seeded for m in methods] == expected


def test_rules_take_options_of_inner_rules() -> None:
    nested = 'bucketing:bucket_size=3,rule=centered-clip,rule_options={"tau": 1.5, "iterations": 2}'
    first, second = RunOptions(rules=(nested, nested.replace("2}", "3}"))).build().methods
    assert first.options["rule_options"] == {"tau": 1.5, "iterations": 2}
    assert first.label.startswith("bucketing-bucket-size=3-rule=centered-clip-rule-options=tau+1.5")
    assert first.label != second.label
    (plain,) = RunOptions(rules=("amplified:beta=2.0,sequential=true",)).build().methods
    assert plain.label == "amplified-beta=2.0-sequential=True"  # names of folders that exist


def test_paths_as_options_of_rules_have_valid_labels() -> None:
    rules = (
        "mifa:memory_folder=/x_y/rows",
        "mifa:memory_folder=/a long path/of/a/folder/with rows",
    )
    short, long = RunOptions(rules=rules).build().methods
    assert short.options == {"memory_folder": "/x_y/rows"}
    assert short.label == "mifa-memory-folder=x+y+rows"
    assert long.label.startswith("mifa-memory-folder=a+long+path+of+a.")


@pytest.mark.slow
def test_a_trace_that_has_changed_is_another_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "trace.csv", tmp_path / "out"
    write_trace(path, [[0, 1]] * 3)
    arguments = [*TINY, "--rules", "fedavg", "--dropout", f"trace:path={path}", "--out", str(out)]
    assert main(arguments) == 0
    before = (out / "metrics.csv").read_bytes()
    assert main(arguments) == 0
    write_trace(path, [[2, 3]] * 3)
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "inputs.json: the folder belongs to another configuration" in said and str(path) in said
    assert (out / "metrics.csv").read_bytes() == before
    assert main([*arguments[:-1], str(tmp_path / "new"), "--reuse", str(out)]) == 0
    assert (tmp_path / "new" / "metrics.csv").read_bytes() != before


def test_different_dropout_settings_with_one_label_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 'trace-path=a[+]b\.csv' for .*a/b\.csv.*a_b\.csv"):
        RunOptions(dropout=("trace:path=a/b.csv", "trace:path=a_b.csv")).build()


def test_dropout_options_and_ratios() -> None:
    options = RunOptions(
        dropout=("markov:memory=0.9", "round-robin:tau_max=50", "bernoulli:p=[0.1,0.2],levels=1"),
        alphas=(0.3, 0.7),
    )
    assert [(d.process, d.options) for d in options.build().dropouts] == [
        ("markov", {"rate": 0.7, "memory": 0.9}),
        ("markov", {"rate": 0.3, "memory": 0.9}),
        ("round-robin", {"tau_max": 50}),  # it has no ratio, so it occurs once
        ("bernoulli", {"p": [0.1, 0.2], "levels": 1}),  # its own p counts
    ]


def test_config_file_is_complete(tmp_path: Path) -> None:
    config = RunOptions().build()
    (tmp_path / "config.json").write_text(config.to_json())
    assert read_config(tmp_path / "config.json") == config
