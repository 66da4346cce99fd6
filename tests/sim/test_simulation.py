# SPDX-License-Identifier: Apache-2.0
"""The simulation loop: determinism, resuming, and the record of a round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fastagg
from fastagg_sim.config import Config, ConfigError, Dropout, Job, LocalTraining, Method, Task
from fastagg_sim.report import check
from fastagg_sim.rule_seeds import draws
from fastagg_sim.seeds import derive
from fastagg_sim.simulation import RoundRecord, Simulation

RULES = (
    *("fedavg", "fdms", "stale", "stale-models", "mifa", "mifa-client", "fedstale", "mimic"),
    *("scaffold", "bucketing"),
)
CLIENT_MODE = {"options": {"mode": "client"}}


def make_job(
    rule: str = "fdms", seed: int = 0, method: dict[str, Any] | None = None, **task: Any
) -> Job:
    settings: dict[str, Any] = {
        "dataset": "digits",
        "partition": "clustered",
        "model": "logistic",
        "training": LocalTraining(batch_size=10, local_epochs=1, lr=0.1),
        "rounds": 6,
        "num_clients": 10,
        "partition_options": {"num_groups": 5, "samples_per_client": 20},
    }
    return Job(
        Task(**{**settings, **task}),
        Method(rule, rule, **(method or {})),
        Dropout("cluster-floor", {"alpha": 0.4}),
        seed,
    )


def metrics(record: RoundRecord) -> dict[str, Any]:
    return {name: v for name, v in asdict(record).items() if not name.startswith("seconds")}


def run(simulation: Simulation) -> list[dict[str, Any]]:
    records = []
    while not simulation.done:
        records.append(metrics(simulation.run_round()))
    return records


@pytest.mark.parametrize(
    ("rule", "method"),
    [
        *((rule, {"full_first_round": rule == "fdms"}) for rule in RULES),
        ("mimic", CLIENT_MODE | {"gradient_units": True}),
    ],
)
@pytest.mark.slow
def test_same_seed_same_numbers_and_resuming_changes_nothing(
    rule: str, method: dict[str, Any], tmp_path: Path
) -> None:
    job = make_job(rule, method=method)
    first = Simulation(job)
    records = [metrics(first.run_round()) for _ in range(3)]
    first.save(tmp_path)
    records += run(first)

    again = Simulation(job)
    torch.manual_seed(99)  # the global generator must not matter
    assert run(again) == records
    assert torch.equal(again.params, first.params)

    resumed = Simulation(job)
    resumed.load(tmp_path)
    assert resumed.next_round == 3
    assert run(resumed) == records[3:]
    assert torch.equal(resumed.params, first.params)


def test_a_resumed_job_has_its_rows_in_the_memory_folder(tmp_path: Path) -> None:
    rows, checkpoint = tmp_path / "rows", tmp_path / "checkpoint"
    rows.mkdir()
    checkpoint.mkdir()
    job = make_job("mifa", method={"options": {"memory_folder": str(rows)}})
    first = Simulation(job)
    first.run_round()
    first.save(checkpoint)
    resumed = Simulation(job)
    resumed.load(checkpoint)
    assert isinstance(resumed.aggregator, fastagg.MIFA)
    assert resumed.aggregator.memory.store.folder == rows
    assert run(resumed) == run(first)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fdms", "mimic", "scaffold"])
def test_clients_at_once_repeat_to_the_bit_and_differ_by_rounding(
    rule: str, tmp_path: Path
) -> None:
    def job(clients_at_once: int) -> Job:
        training = LocalTraining(
            batch_size=8, local_epochs=1, lr=0.1, clients_at_once=clients_at_once
        )
        return make_job(rule, training=training)

    first = Simulation(job(4))  # six are active: four and two at once
    records = [metrics(first.run_round()) for _ in range(3)]
    first.save(tmp_path)
    records += run(first)
    again = Simulation(job(4))
    again.load(tmp_path)
    assert run(again) == records[3:]
    assert torch.equal(again.params, first.params)
    alone = Simulation(job(1))
    run(alone)
    # Six rounds of rounding. FDMS could choose another friend, but no two are that close here.
    torch.testing.assert_close(alone.params, first.params, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("rule", "options"), [("fdms-means", {}), ("bucketing", {}), ("fdms", {"sketch": 64})]
)
def test_a_seeded_rule_draws_numbers_of_its_own_in_every_run(
    rule: str, options: dict[str, Any]
) -> None:
    def seed_of(seed: int, seeded: bool) -> object:
        job = make_job(rule, seed, {"options": options, "seeded": seeded})
        return Simulation(job).aggregator.options()["seed"]

    seeds = [seed_of(seed, True) for seed in (0, 1, 1)]
    assert seeds[0] != seeds[1] == seeds[2] == derive(1, "rule")
    assert [seed_of(seed, False) for seed in (0, 1)] == [0, 0]
    with pytest.raises(ConfigError, match="seeded"):
        Method("a", rule, {**options, "seed": 3}, seeded=True)


def test_a_rule_inside_another_draws_numbers_of_its_own_in_every_run() -> None:
    def seed_of(seed: int, inner: dict[str, Any] | None = None) -> object:
        options = {"rule": "bucketing", "rule_options": inner}
        job = make_job("nnm", seed, {"options": options, "seeded": draws("nnm", options)})
        return Simulation(job).aggregator.options()["rule_options"]["seed"]

    assert seed_of(0) != seed_of(1) == derive(1, "rule", 1)
    assert seed_of(1, {"bucket_size": 3}) == seed_of(1)
    assert seed_of(1, {"seed": 3}) == 3


def test_rules_inside_each_other_have_different_seeds() -> None:
    options = {"rule": "bucketing", "seed": 7, "rule_options": {"rule": "bucketing"}}
    job = make_job("bucketing", 1, {"options": options, "seeded": draws("bucketing", options)})
    found = Simulation(job).aggregator.options()
    inner = found["rule_options"]
    assert found["seed"] == 7
    assert inner["seed"] == derive(1, "rule", 1)
    assert inner["rule_options"]["seed"] == derive(1, "rule", 2)


def test_seeds_differ() -> None:
    assert run(Simulation(make_job(seed=0))) != run(Simulation(make_job(seed=1)))


def test_global_random_state_is_unchanged() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run(Simulation(make_job(rounds=1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_full_participation_makes_all_averaging_rules_the_same() -> None:
    """With all clients active, FDMS, MIFA, MimiC and Stale are the plain mean."""
    dropout = Dropout()
    finals = []
    for rule in ("fedavg", "fdms", "stale", "mifa", "mimic"):
        job = make_job(rule)
        simulation = Simulation(Job(job.task, job.method, dropout, job.seed))
        run(simulation)
        finals.append(simulation.params)
    for params in finals[1:]:
        # Six rounds of rounding differences between the rules' kernels.
        torch.testing.assert_close(params, finals[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradient_units", [False, True])
@pytest.mark.slow
def test_both_modes_of_mimic_end_with_the_same_parameters(gradient_units: bool) -> None:
    training = LocalTraining(batch_size=10, local_epochs=2, lr=0.1, lr_decay=0.9)
    finals = []
    for method in ({}, CLIENT_MODE):
        given = {**method, "gradient_units": gradient_units}
        simulation = Simulation(make_job("mimic", rounds=12, training=training, method=given))
        run(simulation)
        finals.append(simulation.params)
    # Twelve rounds of float32 roundings of the sent rows, carried through local training.
    torch.testing.assert_close(finals[1], finals[0], rtol=1e-4, atol=1e-5)
    plain = Simulation(make_job("fedavg", rounds=12, training=training))
    run(plain)
    assert (plain.params - finals[0]).abs().max() > 1e-2  # corrections do matter here


def test_mifa_is_the_same_wherever_rows_are_kept() -> None:
    """Over 12 rounds: the server keeps the rows, or the clients do and send differences."""
    training = LocalTraining(batch_size=10, local_steps=1, lr=0.1, lr_decay=0.9)
    finals = []
    for rule in ("mifa", "mifa-client"):
        given = {"gradient_units": True, "full_first_round": True}
        simulation = Simulation(make_job(rule, rounds=12, training=training, method=given))
        run(simulation)
        finals.append(simulation.params)
    # Twelve rounds of float32 roundings of the sent rows, carried through local training.
    torch.testing.assert_close(finals[1], finals[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rule", "given"),
    [("mimic", {"mode": "server"}), ("mimic", {"mode": "client"}), ("mifa-client", {})],
)
def test_a_client_whose_update_was_dropped_comes_back(
    rule: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose update has a NaN misses only that round, wherever vectors are kept."""
    options = {**given, "nonfinite": "drop"}
    simulation = Simulation(make_job(rule, method={"options": options, "full_first_round": True}))
    train = simulation._train

    def once(clients: Sequence[int], index: int, scaffold: fastagg.Scaffold | None) -> None:
        train(clients, index, scaffold)
        if index == 0 and 3 in clients:
            simulation._buffer.row(3)[0] = torch.nan

    monkeypatch.setattr(simulation, "_train", once)
    rejected = []
    step = simulation._step

    def noted(active: torch.Tensor) -> fastagg.StepReport:
        report = step(active)
        rejected.append(report.rejected.tolist())
        return report

    monkeypatch.setattr(simulation, "_step", noted)
    run(simulation)
    assert any(3 in active.tolist() for active in simulation._history[1:])
    assert rejected == [[3], *[[]] * 5]


def test_a_job_may_end_after_a_number_of_uploads() -> None:
    records = run(Simulation(make_job(rounds=50, max_uploads=20, eval_every=10)))
    assert [r["uploads"] for r in records] == [6, 12, 18, 24]
    assert [r["accuracy"] is not None for r in records] == [False, False, False, True]
    records = run(Simulation(make_job("scaffold", rounds=50, max_uploads=20)))
    assert [r["uploads"] for r in records] == [12, 24]
    assert len(run(Simulation(make_job(rounds=2, max_uploads=20)))) == 2


def test_a_method_may_train_in_its_own_way() -> None:
    own = LocalTraining(batch_size=10, local_epochs=1, lr=0.1, prox=0.5)
    ends = [Simulation(make_job("fedavg", method={"training": t})) for t in (None, own)]
    ends.append(Simulation(make_job("fedavg", training=own)))
    for simulation in ends:
        run(simulation)
    assert torch.equal(ends[1].params, ends[2].params)
    assert not torch.equal(ends[0].params, ends[1].params)


def test_distances_between_updates_of_friends_and_of_all() -> None:
    simulation = Simulation(make_job("fedavg", rounds=2, distances=True))
    records = [simulation.run_round() for _ in range(2)]
    for record in records:
        assert record.distance2_friends is not None and record.distance2_all is not None
        assert 0 < record.distance2_friends < record.distance2_all
    clients = simulation._history[-1].tolist()
    rows = torch.stack(simulation._buffer.rows(clients)).double()
    distance2 = torch.cdist(rows, rows).square()
    assert simulation.groups is not None
    friends = [
        float(distance2[i, j])
        for i in range(len(clients))
        for j in range(i)
        if simulation.groups[clients[i]] == simulation.groups[clients[j]]
    ]
    # the squares come out of inner products of float32 rows, summed in float64 by blocks
    assert records[-1].distance2_friends == pytest.approx(max(friends), rel=1e-4)
    assert records[-1].distance2_all == pytest.approx(float(distance2.max()), rel=1e-4)


def test_uploads_first_round_and_evaluation_schedule() -> None:
    job = make_job(method={"full_first_round": True}, eval_every=4)
    records = run(Simulation(job))
    assert [r["active"] for r in records] == [10, 6, 6, 6, 6, 6]
    assert [r["uploads"] for r in records] == [10, 16, 22, 28, 34, 40]
    evaluated = [r["round"] for r in records if r["accuracy"] is not None]
    assert evaluated == [3, 5]  # every fourth, and the last
    assert all((r["loss"] is None) == (r["accuracy"] is None) for r in records)


def test_scaffold_uploads_twice_and_learns_the_clients_gradients() -> None:
    training = LocalTraining(batch_size=10, local_epochs=2, lr=0.1, lr_decay=0.9, momentum=0.5)
    job = make_job("scaffold", rounds=3, training=training)
    simulation = Simulation(job)
    records = run(simulation)
    assert [r["active"] for r in records] == [6, 6, 6]
    assert [r["uploads"] for r in records] == [12, 24, 36]
    scaffold = simulation.aggregator
    assert isinstance(scaffold, fastagg.Scaffold)
    assert scaffold.local_work.tolist() == [training.work(20, 2)] * 10
    assert scaffold.controls.clone().any(dim=1).sum() >= 6
    # the mean control variate is the mean of all, up to float32 rounding
    mean = scaffold.controls.clone().mean(dim=0)
    torch.testing.assert_close(scaffold.mean_control, mean, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_scaffold_beats_fedavg_where_clients_drift() -> None:
    """The claim of its paper: many local steps on clients with few labels each, all active."""
    training = LocalTraining(batch_size=20, local_epochs=20, lr=0.1)
    losses = {}
    for rule in ("fedavg", "scaffold"):
        job = make_job(rule, rounds=12, training=training)
        simulation = Simulation(Job(job.task, job.method, Dropout(), job.seed))
        losses[rule] = run(simulation)[-1]["loss"]
    assert losses["scaffold"] < 0.9 * losses["fedavg"], losses


@pytest.mark.parametrize("rule", ["fedavg", "fdms", "mifa", "mimic", "scaffold"])
@pytest.mark.parametrize("lr_decay", [1.0, 0.8])
@pytest.mark.slow
def test_gradient_units_matter_to_a_memory_and_to_a_decaying_rate_only(
    rule: str, lr_decay: float
) -> None:
    training = LocalTraining(batch_size=10, local_epochs=1, lr=0.2, lr_decay=lr_decay)
    finals = []
    for gradient_units in (False, True):
        job = make_job(rule, training=training, method={"gradient_units": gradient_units})
        simulation = Simulation(job)
        run(simulation)
        finals.append(simulation.params)
    close = torch.allclose(finals[0], finals[1], rtol=1e-4, atol=1e-5)  # six rounds of rounding
    assert close == (lr_decay == 1.0 or rule not in ("mifa", "mimic"))


def test_a_rule_that_remembers_models_has_no_gradient_units() -> None:
    """A remembered model would be params + update / lr."""
    job = make_job("stale-models", method={"gradient_units": True})
    message = "gradient_units: expected false for stale-models, which remembers models"
    with pytest.raises(ConfigError, match=message):
        Simulation(job)
    with pytest.raises(ConfigError, match=message):
        check(Config("units", job.task, (job.method,), (job.dropout,), (0,)))


@pytest.mark.parametrize(
    ("options", "equal"),
    [({}, True), ({"server_optimizer": "adam"}, False), ({"clip_norm": 0.05}, False)],
)
def test_gradient_units_matter_to_server_optimizers_and_norms(
    options: dict[str, Any], equal: bool
) -> None:
    finals = []
    for gradient_units in (False, True):
        method = {"gradient_units": gradient_units, "options": options}
        simulation = Simulation(make_job("fedavg", method=method, rounds=2))
        run(simulation)
        finals.append(simulation.params)
    assert torch.allclose(*finals, rtol=1e-4, atol=1e-5) == equal  # two rounds of rounding


def test_mifa_in_gradient_units_uses_the_current_rate_for_old_updates() -> None:
    training = LocalTraining(batch_size=10, local_epochs=1, lr=0.2, lr_decay=0.5)
    job = make_job("mifa", training=training, method={"gradient_units": True})
    simulation = Simulation(job)
    simulation.run_round()
    before = simulation.params.clone()
    assert isinstance(simulation.aggregator, fastagg.MIFA)
    first = simulation.aggregator.memory.clone()
    active = simulation._active(1).tolist()
    simulation._history.pop()
    simulation.run_round()
    memory = simulation.aggregator.memory.clone()
    away = [k for k in range(10) if k not in active]
    assert torch.equal(memory[away], first[away])
    torch.testing.assert_close(  # one round of rounding
        simulation.params - before, 0.2 * 0.5 * memory.mean(dim=0), rtol=1e-4, atol=1e-6
    )


def test_substitutions_are_counted_and_checked_against_groups() -> None:
    records = run(Simulation(make_job(method={"full_first_round": True}, rounds=4)))
    assert records[0]["substitutions"] == 0
    assert records[0]["wrong_friend_rate"] is None
    assert [r["substitutions"] for r in records[1:]] == [4, 4, 4]
    assert all(0.0 <= r["wrong_friend_rate"] <= 1.0 for r in records[1:])
    assert [r["pairs"] for r in records] == [90, 30, 30, 30]


def test_judging_friends() -> None:
    simulation = Simulation(make_job())
    simulation.groups = torch.tensor([0, 0, 1, 1])
    friends, active = (
        torch.tensor([0, 2, 2, -1]),
        torch.tensor([0, 2]),
    )  # 0 and 2 active; 1 has a wrong friend, 3 has none
    assert simulation._count_substitutions(friends, active) == (1, 1.0)
    assert simulation._count_substitutions(torch.tensor([0, 0, 2, 2]), active) == (2, 0.0)
    assert simulation._count_substitutions(None, active) == (0, None)
    simulation.groups = None
    assert simulation._count_substitutions(friends, active) == (1, None)


def test_training_on_digits_learns() -> None:
    records = run(Simulation(make_job("fedavg", rounds=15)))
    assert records[-1]["accuracy"] > 0.5  # chance is 0.1
    assert records[-1]["loss"] < records[0]["loss"]


@pytest.mark.parametrize("name", ["params", "corrections", "state.json", "names", "shape"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path, name: str) -> None:
    job = make_job("mimic", method=CLIENT_MODE)
    simulation = Simulation(job)
    simulation.run_round()
    simulation.save(tmp_path)
    path = tmp_path / (name if name == "state.json" else "params.safetensors")
    if name == "corrections":
        path = tmp_path / "corrections.safetensors"
    if name == "names":
        save_file({"model": simulation.params}, path)
    elif name == "shape":
        save_file({"params": simulation.params[:-1].clone()}, path)
    else:
        path.write_bytes(path.read_bytes()[:-9])
    before = simulation.params.clone()
    with pytest.raises(ConfigError, match=path.name):
        simulation.load(tmp_path)
    assert torch.equal(simulation.params, before) and simulation.next_round == 1


def test_longest_absent_clients_are_sampled_first_also_after_a_restart(tmp_path: Path) -> None:
    options = {"sample": 3, "selection": "longest-absent"}
    job = dataclasses.replace(make_job("mifa"), dropout=Dropout("sampled", options))
    whole = Simulation(job)
    records = run(whole)
    assert sorted(torch.cat(whole._history[:3]).tolist()) != [*range(9)]  # ties are at random
    assert len(torch.cat(whole._history[:4]).unique()) == 10
    first = Simulation(job)
    for _ in range(3):
        first.run_round()
    first.save(tmp_path)
    later = Simulation(job)
    later.load(tmp_path)
    assert run(later) == records[3:]
    assert torch.equal(later.params, whole.params)


class TestFedAWE:
    """Clients that keep their models while they are absent, and echo their updates."""

    def test_follows_the_algorithm_of_the_paper(self) -> None:
        """Algorithm 1 in float64, around the local training of the simulation."""
        simulation = Simulation(make_job("fedavg", rounds=12, method={"echo": 0.7}))
        other = Simulation(make_job("fedavg", rounds=12))  # for its local training
        models = [simulation.params.double() for _ in range(10)]
        tau = [-1] * 10
        for t in range(12):
            simulation.run_round()
            echoed = []
            active = simulation._history[t].tolist()
            for k in active:
                other.params = models[k].float()
                other._train([k], t, None)
                update = other._buffer.row(k).double()
                echoed.append(models[k] + 0.7 * (t - tau[k]) * update)
            new = sum(echoed) / len(active)
            for k in active:
                models[k], tau[k] = new, t
            # float32 roundings of the models, which twelve rounds of training carry on
            torch.testing.assert_close(simulation.params.double(), new, rtol=1e-4, atol=1e-5)
        assert max(tau) == 11 and min(tau) < 11

    def test_with_all_clients_it_is_fedavg(self) -> None:
        given = {"full_participation": True}
        finals = []
        for echo in (None, 1.0):
            job = make_job("fedavg", method={"echo": echo, **given})
            simulation = Simulation(dataclasses.replace(job, dropout=Dropout()))
            run(simulation)
            finals.append(simulation.params)
        torch.testing.assert_close(*finals, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("model", ["logistic", "digits-mlp"])
    def test_a_restart_changes_no_bit(self, model: str, tmp_path: Path) -> None:
        job = make_job("fedavg", method={"echo": 1.0}, model=model)
        whole = Simulation(job)
        records = run(whole)
        first = Simulation(job)
        for _ in range(3):
            first.run_round()
        first.save(tmp_path)
        later = Simulation(job)
        later.load(tmp_path)
        assert run(later) == records[3:]
        assert torch.equal(later.params, whole.params)

    def test_a_damaged_checkpoint(self, tmp_path: Path) -> None:
        job = make_job("fedavg", method={"echo": 1.0})
        simulation = Simulation(job)
        simulation.run_round()
        simulation.save(tmp_path)
        save_file({"first": simulation.params}, tmp_path / "models.safetensors")
        with pytest.raises(ConfigError, match=r"models\.safetensors: expected"):
            Simulation(job).load(tmp_path)

    @pytest.mark.parametrize(
        ("rule", "options", "echo"),
        [
            ("fedavg", {}, -1.0),
            ("scaffold", {}, 1.0),
            ("mifa-client", {}, 1.0),
            ("mimic", {"mode": "client"}, 1.0),
        ],
    )
    def test_what_it_does_not_go_with(self, rule: str, options: Any, echo: float) -> None:
        with pytest.raises(ConfigError, match="echo: expected"):
            Method(rule, rule, options, echo=echo)


class TestChurn:
    """Clients that join and leave for good: the rule grows, and forgets."""

    @staticmethod
    def job(rule: str, **method: Any) -> Job:
        options = {"initial": 3, "join_every": 2, "lifetime": 5.0}
        job = make_job(rule, rounds=16, method=method)
        return dataclasses.replace(job, dropout=Dropout("churn", options))

    @pytest.mark.parametrize(
        ("rule", "method"),
        [
            *((rule, {}) for rule in RULES),
            ("mifa", {"sample_weights": True}),
            ("mifa-client", {"sample_weights": True}),
            ("mimic", {**CLIENT_MODE, "gradient_units": True}),
            ("fedavg", {"echo": 1.0}),
            ("fdms", {"full_first_round": True}),
        ],
    )
    def test_a_restart_changes_no_bit(
        self, rule: str, method: dict[str, Any], tmp_path: Path
    ) -> None:
        job = self.job(rule, **method)
        whole = Simulation(job)
        assert whole.aggregator.num_clients == 3
        records = run(whole)
        assert whole.aggregator.num_clients == 10
        first = Simulation(job)
        for _ in range(7):
            first.run_round()
        first.save(tmp_path)
        later = Simulation(job)
        later.load(tmp_path)
        assert later.aggregator.num_clients == 6
        assert run(later) == records[7:]
        assert torch.equal(later.params, whole.params)

    def test_sampled_clients_join_and_are_forgotten(self) -> None:
        options = {"initial": 3, "join_every": 2, "lifetime": 5.0}
        sampled = {"sample": 10, "process": "churn", "options": options}
        plain = Simulation(self.job("mifa"))
        nested = Simulation(dataclasses.replace(plain.job, dropout=Dropout("sampled", sampled)))
        assert nested.aggregator.num_clients == 3
        assert run(nested) == run(plain)  # all are sampled
        assert torch.equal(nested.params, plain.params)

    def test_who_has_left_is_forgotten(self) -> None:
        simulation = Simulation(self.job("mifa"))
        process, gone = simulation._dropout, set[int]()
        for t in range(16):
            simulation.run_round()
            gone.update(process.left(t))
            memory = simulation.aggregator.state_dict()["memory"]
            present = set(range(process.joined(t))) - gone
            assert {k for k, row in enumerate(memory) if row.any()} == present
        assert len(gone) >= 3

    def test_rows_that_clients_keep_leave_with_them(self) -> None:
        finals = []
        for rule in ("mifa", "mifa-client"):
            simulation = Simulation(self.job(rule))
            run(simulation)
            finals.append(simulation.params)
        # Float32 roundings of the sent rows, carried through local training.
        torch.testing.assert_close(finals[1], finals[0], rtol=1e-4, atol=1e-5)
