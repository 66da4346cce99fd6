# SPDX-License-Identifier: Apache-2.0
"""Shadow runs: computed once, resumed, and the candidates read from them."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from fastagg_sim import shadow_runs
from fastagg_sim.config import (
    Config,
    ConfigError,
    Dropout,
    Job,
    LocalTraining,
    Method,
    Task,
    config_from_dict,
)
from fastagg_sim.data import DataError
from fastagg_sim.dropout.shadow import Candidates
from fastagg_sim.job_folder import JobFolder
from fastagg_sim.runner import Interrupted, run_job
from fastagg_sim.shadow_runs import Shadow
from fastagg_sim.simulation import Simulation

SHADOW = Shadow(
    Task(
        dataset="digits",
        partition="dirichlet",
        model="logistic",
        training=LocalTraining(batch_size=8, local_steps=2, lr=0.1),
        rounds=1,
        num_clients=6,
        partition_options={"alpha": 0.3, "redraw": 1},
    ),
    LocalTraining(batch_size=8, local_steps=1, lr=0.1, momentum=0.9, keep_momentum=True),
    {"tau": 100.0, "iterations": 3},
    first_round=1,
    last_round=3,
    num_fedavg=2,
    num_clipping=1,
)


def found(shadow: Shadow, root: Path, seeds: tuple[int, ...] = (0,)) -> dict[int, Candidates]:
    return shadow.candidates(seeds, root=root, workers=1, console=Console(file=io.StringIO()))


@pytest.mark.slow
def test_norms_are_those_of_gradient_sums_and_momenta(tmp_path: Path) -> None:
    chosen = found(SHADOW, tmp_path)[0]
    changes = {}
    for job in SHADOW.config([0]).jobs():
        simulation, norms = Simulation(job), {}
        for t in range(4):
            simulation.run_round()
            norms[t] = simulation.norms.get(t)
        assert set(simulation.norms) == {1, 3}
        if job.method.label == "clipping":
            # of the last round: what the clients keep
            kept = [float(simulation._momentum[k].norm()) for k in range(6)]
            assert norms[3] == pytest.approx(kept, rel=1e-5)  # float32 rows
        changes[job.method.label] = [abs(b - a) for a, b in zip(norms[1], norms[3], strict=True)]
    first = sorted(range(6), key=lambda k: -changes["fedavg"][k])[:2]
    rest = sorted(set(range(6)) - set(first), key=lambda k: -changes["clipping"][k])
    assert (chosen.fedavg, chosen.clipping) == (tuple(first), tuple(rest[:1]))


@pytest.mark.slow
def test_are_computed_once_and_shared_by_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = found(SHADOW, tmp_path, (0, 1))
    files = sorted(tmp_path.rglob("norms.csv"))
    assert len(files) == 4
    before = [file.stat().st_mtime_ns for file in files]
    assert found(SHADOW, tmp_path)[0] == both[0]
    again = dataclasses.replace(SHADOW, num_fedavg=4)  # other candidates of the same runs
    assert found(again, tmp_path, (1,))[1].fedavg[:2] == both[1].fedavg
    assert [file.stat().st_mtime_ns for file in files] == before
    for change in (
        {"last_round": 2},
        {"clipping": {"tau": 1.0}},
        {"seed_shift": 7},
        {"sample_weights": True},
    ):
        other = dataclasses.replace(SHADOW, **change)
        assert other.folder(tmp_path) != SHADOW.folder(tmp_path)
    assert again.folder(tmp_path) == SHADOW.folder(tmp_path)


@pytest.mark.slow
def test_an_interrupted_shadow_run_goes_on(tmp_path: Path) -> None:
    whole = found(SHADOW, tmp_path / "a")
    for job in SHADOW.config([0]).jobs():
        folder = JobFolder(SHADOW.folder(tmp_path / "b") / job.key, job)
        folder.prepare()
        rounds: list[int] = []
        finished = run_job(folder, lambda t, _, r=rounds: r.append(t), lambda r=rounds: 2 in r, 0.0)
        assert not finished  # the norms of round 1 are in the checkpoint only
    assert found(SHADOW, tmp_path / "b") == whole
    names = ("norms.csv", "metrics.csv")
    texts = [
        [p.read_text() for name in names for p in sorted((tmp_path / part).rglob(name))]
        for part in ("a", "b")
    ]
    assert texts[0] == texts[1]


def test_proportions_stay_unless_the_seed_is_shifted() -> None:
    """Shadow clients have the label proportions of the real ones, and other samples."""
    real = dataclasses.replace(SHADOW.task, partition_options={"alpha": 0.3})
    labels = []
    for task, seed in ((real, 0), (SHADOW.task, 0), (SHADOW.task, 1000)):
        simulation = Simulation(Job(task, Method("a", "fedavg"), Dropout(), seed))
        every = map(simulation._clients.__getitem__, range(task.num_clients))
        labels.append([client.y.bincount(minlength=10).float() for client in every])
    same, shifted = (
        sum(float((a - b).abs().sum()) for a, b in zip(labels[0], other, strict=True))
        for other in labels[1:]
    )
    # all samples are used, so the last clients take what is left; still most labels agree
    assert same < 0.6 * shifted
    assert same > 0


def test_momentum_must_be_of_one_kept_step() -> None:
    with pytest.raises(ConfigError, match="momentum: expected one local step"):
        dataclasses.replace(SHADOW, momentum=LocalTraining(local_steps=1, momentum=0.9))


def test_candidates_may_differ_from_seed_to_seed() -> None:
    options = {"epsilon": 0.5, "sample": 4, "sizes": "equal"}
    each = {"0": {"candidates": [0, 1]}, "1": {"candidates": [4, 5]}}
    dropout = Dropout("adversarial", options, each)
    assert dropout.label == Dropout("adversarial", options).label
    config = Config("c", SHADOW.task, (Method("a", "fedavg"),), (dropout,), (0, 1))
    jobs = config.jobs()
    assert [job.dropout.seed_options for job in jobs] == [{s: each[s]} for s in ("0", "1")]
    assert config_from_dict(dataclasses.asdict(config)) == config
    for job, candidates in zip(jobs, ({0, 1}, {4, 5}), strict=True):
        process = Simulation(job)._dropout
        silenced = {
            client
            for t in range(30)
            for client in set(process.sampled(t)) - set(process.active(t).tolist())
        }
        assert silenced == candidates


@pytest.mark.slow
def test_waits_for_a_process_with_the_same_runs(tmp_path: Path) -> None:
    folder = SHADOW.folder(tmp_path)
    folder.mkdir(parents=True)
    printed = io.StringIO()
    left: list[str] = []
    with open(folder / "lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def release_when_it_waits() -> None:
            deadline = time.monotonic() + 120.0
            while "waiting" not in printed.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
            left.extend(path.name for path in folder.iterdir())
            fcntl.flock(other, fcntl.LOCK_UN)

        thread = threading.Thread(target=release_when_it_waits)
        thread.start()
        chosen = SHADOW.candidates([0], root=tmp_path, workers=1, console=Console(file=printed))
        thread.join()
    assert "waiting for the process that holds" in printed.getvalue()
    assert left == ["lock"]  # nothing was touched before
    assert len(chosen[0].ids) == 3 and len(list(folder.rglob("done.json"))) == 2


def test_an_interrupt_while_waiting_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: object, how: int) -> None:
        raise BlockingIOError if how & fcntl.LOCK_NB else KeyboardInterrupt

    monkeypatch.setattr(shadow_runs.fcntl, "flock", flock)
    with pytest.raises(Interrupted):
        found(SHADOW, tmp_path)


def test_what_cannot_run_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"shadow: .*unknown model 'lenet6'"):
        task = dataclasses.replace(SHADOW.task, model="lenet6")
        found(dataclasses.replace(SHADOW, task=task), tmp_path)
    monkeypatch.setenv("FASTAGG_DATA", str(tmp_path / "empty"))
    with pytest.raises(DataError, match="mnist"):
        task = dataclasses.replace(SHADOW.task, dataset="mnist")
        found(dataclasses.replace(SHADOW, task=task), tmp_path)
