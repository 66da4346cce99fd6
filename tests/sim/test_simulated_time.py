# SPDX-License-Identifier: Apache-2.0
"""Runs with latencies: which answers a step takes, when rounds end, and resuming."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastagg_sim.config import (
    Config,
    ConfigError,
    Dropout,
    Job,
    Latency,
    LocalTraining,
    Method,
    Schedule,
    Task,
    config_from_dict,
)
from fastagg_sim.dropout.trace import write_trace
from fastagg_sim.latency import make_latency
from fastagg_sim.report import check
from fastagg_sim.results import ResultsFolder
from fastagg_sim.runner import run_jobs
from fastagg_sim.schedules import Plan
from fastagg_sim.simulated_time import ROWS
from fastagg_sim.simulation import RoundRecord, Simulation, make_aggregator

K = 10
LATENCY = Latency("lognormal", {"median": 10.0, "sigma": 0.8})
DEADLINE = Schedule("deadline", {"seconds": 11.0})
OVER_SELECTION = Schedule("over-selection", {"take": 4, "extra": 3})
IN_TIME = (None, DEADLINE, OVER_SELECTION)


def make_job(
    schedule: Schedule | None = None,
    rule: str = "mifa",
    *,
    dropout: Dropout | None = None,
    method: dict[str, Any] | None = None,
    **task: Any,
) -> Job:
    settings: dict[str, Any] = {
        "dataset": "digits",
        "partition": "clustered",
        "model": "logistic",
        "training": LocalTraining(batch_size=10, local_epochs=1, lr=0.1),
        "rounds": 6,
        "num_clients": K,
        "partition_options": {"num_groups": 5, "samples_per_client": 20},
        "latency": LATENCY,
    }
    return Job(
        Task(**{**settings, **task}),
        Method(rule, rule, schedule=schedule, **(method or {})),
        dropout or Dropout("exact", {"alpha": 0.2}),
        seed=3,
    )


def run(simulation: Simulation) -> list[RoundRecord]:
    records = []
    while not simulation.done:
        record = simulation.run_round()
        times = {f.name: 0.0 for f in dataclasses.fields(record) if f.name.startswith("seconds")}
        records.append(dataclasses.replace(record, **times))
    return records


def without_latency(job: Job, dropout: Dropout) -> Job:
    task = dataclasses.replace(job.task, latency=None, max_seconds=None)
    return Job(task, dataclasses.replace(job.method, schedule=None), dropout, job.seed)


def test_waiting_for_all_has_the_bits_of_a_run_without_latencies() -> None:
    job = make_job()
    timed, plain = Simulation(job), Simulation(without_latency(job, job.dropout))
    records = run(timed)
    bare = [dataclasses.replace(r, time=None, late=None, age=None) for r in records]
    assert bare == run(plain)
    assert torch.equal(timed.params, plain.params)
    latency = make_latency("lognormal", num_clients=K, seed=3, **LATENCY.options)
    now = 0.0
    for record, active in zip(records, timed._history, strict=True):
        now += max(latency.seconds(client, record.round) for client in active.tolist())
        assert (record.time, record.late, record.age) == (now, 0, 0.0)


@pytest.mark.parametrize("schedule", [DEADLINE, OVER_SELECTION])
def test_who_is_late_counts_as_absent(schedule: Schedule, tmp_path: Path) -> None:
    """The run has the bits of one without latencies whose dropout are the clients in time."""
    job = make_job(schedule)
    timed = Simulation(job)
    latency = make_latency("lognormal", num_clients=K, seed=3, **LATENCY.options)
    sets: list[list[int]] = []
    step = timed._step
    timed._step = lambda active: sets.append(active.tolist()) or step(active)  # type: ignore[method-assign, func-returns-value]
    records = run(timed)
    for record, active, chosen in zip(records, timed._history, sets, strict=True):
        seconds = {client: latency.seconds(client, record.round) for client in active.tolist()}
        if schedule is DEADLINE:
            assert chosen == [client for client, s in seconds.items() if s <= 11.0]
            assert record.late == len(active) - len(chosen)
        else:
            assert len(chosen) == 4 and set(chosen) <= set(seconds) and record.late == 3
    assert 0 < sum(map(len, sets)) < sum(map(len, timed._history))
    assert [record.uploads for record in records][-1] == sum(map(len, sets))
    write_trace(tmp_path / "trace.csv", sets)
    options = {"path": str(tmp_path / "trace.csv"), "rounds": len(sets)}
    plain = Simulation(without_latency(job, Dropout("trace", options)))
    run(plain)
    assert torch.equal(timed.params, plain.params)


@pytest.mark.parametrize("schedule", IN_TIME)
@pytest.mark.parametrize("rule", ["mifa", "scaffold"])
def test_resuming_changes_nothing(schedule: Schedule | None, rule: str, tmp_path: Path) -> None:
    job = make_job(schedule, rule)
    whole = Simulation(job)
    records = [whole.run_round() for _ in range(3)]
    whole.save(tmp_path)
    rest = run(whole)
    resumed = Simulation(job)
    resumed.load(tmp_path)
    assert run(resumed) == rest
    assert torch.equal(resumed.params, whole.params)
    assert rest[0].time is not None and records[-1].time is not None
    assert rest[0].time > records[-1].time


def test_a_run_ends_at_its_simulated_time() -> None:
    whole = [record.time for record in run(Simulation(make_job(DEADLINE)))]
    assert whole[3] is not None
    simulation = Simulation(make_job(DEADLINE, max_seconds=whole[3], eval_every=10))
    records = run(simulation)
    assert [record.time for record in records] == whole[:4]
    assert [record.accuracy is None for record in records] == [True] * 3 + [False]
    assert simulation.rounds_done == simulation.job.task.rounds
    simulation = Simulation(make_job(DEADLINE, max_seconds=1e6))
    assert len(run(simulation)) == 6  # or after its rounds


@pytest.mark.slow
def test_the_files_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    schedules = [schedule for schedule in IN_TIME if schedule is not None]
    job = make_job()
    config = Config(
        name="timed",
        task=dataclasses.replace(job.task, max_seconds=40.0),
        methods=tuple(Method(s.name, "fedavg", schedule=s) for s in schedules),
        dropouts=(job.dropout,),
        seeds=(0, 1),
    )
    assert config_from_dict(json.loads(config.to_json())) == config
    texts = []
    for workers in (1, 2):
        folder = ResultsFolder(tmp_path / str(workers), config)
        folder.prepare()
        assert not run_jobs(folder.job_folders(), workers=workers).failures
        folder.merge()
        texts.append((folder.path / "metrics.csv").read_bytes())
    assert texts[0] == texts[1]
    rows = list(csv.DictReader(texts[0].decode().splitlines()))
    assert {"time", "late", "age"} <= rows[0].keys()
    assert {float(row["age"]) for row in rows if row["age"]} == {0.0}
    # A folder without jobs/ is continued, although its jobs have fewer rows than rounds.
    shutil.rmtree(tmp_path / "1" / "jobs")
    again = ResultsFolder(tmp_path / "1", config)
    again.prepare()
    assert all(folder.finished for folder in again.job_folders())


@pytest.mark.parametrize("damage", ["time", "entries", "missing"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(damage: str, tmp_path: Path) -> None:
    simulation = Simulation(make_job(DEADLINE))
    simulation.run_round()
    simulation.save(tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    if damage == "missing":
        del state["schedule"]
    else:
        state["schedule"] = {"time": -1.0, "arrivals": []} if damage == "time" else {"x": 1}
    (tmp_path / "state.json").write_text(json.dumps(state))
    other = Simulation(make_job(DEADLINE))
    before = other.params.clone()
    with pytest.raises(ConfigError, match=r"state.json: damaged: schedule: "):
        other.load(tmp_path)
    assert torch.equal(other.params, before) and other.next_round == 0


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="max_seconds: expected none without latency, got 5"):
        make_job(latency=None, max_seconds=5)
    with pytest.raises(ConfigError, match="max_seconds: expected a finite number > 0, got 0"):
        make_job(max_seconds=0)
    job = make_job(DEADLINE, latency=None)
    with pytest.raises(ConfigError, match="schedule: expected none without latency, got Schedule"):
        Config("x", job.task, (job.method,), (job.dropout,), (0,))
    with pytest.raises(ValueError, match="unknown schedule 'never'"):
        Simulation(make_job(Schedule("never")))
    by_group = Latency("classes", {"by": "group"})
    options = {"partition": "dirichlet", "partition_options": {}}
    with pytest.raises(ValueError, match='groups: classes with by="group" needs the group of ever'):
        Simulation(make_job(latency=by_group, **options))
    assert Simulation(make_job(latency=by_group)).run_round().time is not None


# --- late answers -----------------------------------------------------------------------------

KEPT = Schedule("deadline", {"seconds": 11.0, "late": "kept"})
BUFFERED = Schedule("buffered", {"size": 3})
CONSTANT = {"options": {"staleness": "constant"}}


def late_job(schedule: Schedule, rule: str, **settings: Any) -> Job:
    options: dict[str, dict[str, Any]] = {
        "fedavg": {"staleness": "polynomial"},
        "fedbuff": {},
        "mimic": {"staleness": "constant", "max_staleness": 4},
    }
    chosen = options.get(rule, CONSTANT["options"])
    method = {"full_first_round": True, "options": chosen}
    return make_job(schedule, rule, method=method, **{"rounds": 12, **settings})


@pytest.mark.parametrize("schedule", [KEPT, BUFFERED])
@pytest.mark.parametrize("rule", ["fedavg", "fedbuff", "mifa"])
def test_late_answers_have_the_age_of_their_model(schedule: Schedule, rule: str) -> None:
    """Repeat the run by hand: train every client from the model that it started from."""
    job = late_job(schedule, rule)
    timed = Simulation(job)
    models: list[torch.Tensor] = []
    plans: list[Plan] = []
    assert timed._time is not None
    next_plan = timed._time.schedule.next

    def noted(round: int, active: Sequence[int]) -> Plan:
        models.append(timed.params.clone())
        plans.append(next_plan(round, active))
        return plans[-1]

    timed._time.schedule.next = noted  # type: ignore[method-assign]
    records = run(timed)
    by_hand = Simulation(without_latency(make_job(rule=rule), job.dropout))
    aggregator = make_aggregator(
        job.task, job.method, len(timed.params), timed._split, seed=job.seed
    )
    params = models[0].clone()
    for t, plan in enumerate(plans):
        assert torch.equal(params, models[t])
        rows = []
        for work in plan.answers:
            by_hand.params = models[work.round]
            by_hand._train([work.client], work.round, None)
            rows.append(by_hand._buffer.row(work.client).clone())
        clients = [work.client for work in plan.answers]
        aggregator.step(params, rows, clients, ages=plan.ages(t))
        ages = plan.ages(t)
        assert records[t].age == (sum(ages) / len(ages) if ages else None)
    assert torch.equal(params, timed.params)
    assert max(age for t, plan in enumerate(plans) for age in plan.ages(t)) >= 2


@pytest.mark.parametrize("schedule", [KEPT, BUFFERED])
@pytest.mark.parametrize("rule", ["fedavg", "fedbuff", "mifa", "mimic", "fdms"])
def test_resuming_with_clients_at_work_changes_nothing(
    schedule: Schedule, rule: str, tmp_path: Path
) -> None:
    momentum = LocalTraining(local_epochs=1, momentum=0.5, keep_momentum=True, clients_at_once=3)
    job = late_job(schedule, rule, training=momentum)
    whole = Simulation(job)
    for _ in range(5):
        whole.run_round()
    whole.save(tmp_path)
    assert whole._time is not None and whole._time.rows
    rest = run(whole)
    resumed = Simulation(job)
    resumed.load(tmp_path)
    assert run(resumed) == rest
    assert torch.equal(resumed.params, whole.params)


def test_equal_latencies_and_a_buffer_for_all_are_rounds() -> None:
    """FedBuff with M = K is then FedAvg: the mean of all updates, in the time of a round."""
    equal = Latency("lognormal", {"median": 7.0, "sigma": 0.0})
    full = Dropout()
    job = make_job(Schedule("buffered", {"size": K}), "fedbuff", latency=equal, dropout=full)
    buffered, rounds = Simulation(job), Simulation(make_job(None, "fedavg", dropout=full))
    records = run(buffered)
    run(rounds)
    assert [record.time for record in records] == [7.0 * (t + 1) for t in range(6)]
    assert {(record.active, record.late, record.age) for record in records} == {(K, 0, 0.0)}
    # Six rounds of rounding: the factors of the two rules are rounded in other places.
    torch.testing.assert_close(buffered.params, rounds.params, rtol=1e-5, atol=1e-7)


def test_without_late_clients_kept_answers_have_the_bits_of_lost_ones() -> None:
    ends = []
    for late in ("lost", "kept"):
        schedule = Schedule("deadline", {"seconds": 1e6, "late": late})
        simulation = Simulation(make_job(schedule, method=CONSTANT))
        run(simulation)
        ends.append(simulation.params)
    assert torch.equal(*ends)


def test_a_buffer_of_a_rule_with_one_row_per_client() -> None:
    """MIFA takes no second answer of a client in a step; FedBuff does."""
    latency = Latency("classes", {"medians": [1.0, 20.0], "sigma": 1.5})
    counts = {}
    for rule in ("mifa", "fedbuff"):
        job = late_job(BUFFERED, rule, latency=latency, rounds=60, dropout=Dropout())
        simulation = Simulation(job)
        assert simulation._time is not None
        made = simulation._time.schedule
        counts[rule] = 0
        for t in range(60):
            plan = made.next(t, range(K))
            counts[rule] += len(plan.answers) - len({work.client for work in plan.answers})
    assert counts["mifa"] == 0 < counts["fedbuff"]


@pytest.mark.parametrize("damage", ["missing row", "shape", "another client"])
def test_a_checkpoint_with_damaged_rows_is_refused(damage: str, tmp_path: Path) -> None:
    job = late_job(BUFFERED, "fedbuff")
    simulation = Simulation(job)
    simulation.run_round()
    simulation.save(tmp_path)
    assert simulation._time is not None
    rows = {f"{work.client}.{work.round}": row for work, row in simulation._time.rows.items()}
    name = next(iter(rows))
    if damage == "shape":
        rows[name] = torch.zeros(3)
    else:
        row = rows.pop(name)
        if damage == "another client":
            rows["99.0"] = row
    save_file(rows, tmp_path / ROWS)
    other = Simulation(job)
    with pytest.raises(ConfigError, match=rf"{ROWS}: expected "):
        other.load(tmp_path)
    assert other.next_round == 0 and other._time is not None and other._time.time == 0.0


@pytest.mark.parametrize(
    ("rule", "options", "task", "message"),
    [
        ("mifa", {}, {}, "schedule buffered-size=3: rule mifa: expected the option staleness, whi"),
        ("scaffold", {"staleness": "constant"}, {}, "staleness: expected None, got 'constant': th"),
        ("fedbuff", {}, {"distances": True}, "distances: measured among clients that start from"),
        ("fedbuff", {}, {"norm_rounds": (1,)}, "norm_rounds: measured among clients that start"),
    ],
)
def test_what_cannot_take_late_answers_is_refused(
    rule: str, options: dict[str, Any], task: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Simulation(make_job(BUFFERED, rule, method={"options": options}, **task))


@pytest.mark.parametrize(
    ("process", "options"),
    [("churn", {"initial": 3}), ("sampled", {"process": "churn", "options": {"initial": 3}})],
)
def test_churn_does_not_go_with_late_answers(process: str, options: dict[str, Any]) -> None:
    job = make_job(KEPT, dropout=Dropout(process, options), method=CONSTANT)
    with pytest.raises(ConfigError, match=f"dropout {process}: a client that has left could still"):
        Simulation(job)
    with pytest.raises(ConfigError, match=f"dropout {process}: a client that has left could still"):
        check(Config("late", job.task, (job.method,), (job.dropout,), (3,)))
    in_time = make_job(DEADLINE, dropout=job.dropout)
    check(Config("late", in_time.task, (in_time.method,), (in_time.dropout,), (3,)))
