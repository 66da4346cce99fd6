# SPDX-License-Identifier: Apache-2.0
"""The adapter for NVIDIA FLARE, by direct calls: rules, kinds of arrays, bad answers, restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import checkpoint

pytest.importorskip("nvflare", reason="nvflare is not installed (make test-flower installs it)")

from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReservedKey, ReturnCode, ServerCommandKey
from nvflare.apis.shareable import Shareable
from nvflare.app_common.aggregators.intime_accumulate_model_aggregator import (
    InTimeAccumulateWeightedAggregator,
)
from nvflare.app_common.shareablegenerators.full_model_shareable_generator import (
    FullModelShareableGenerator,
)
from nvflare.job_config.api import FedJob

from fastagg.integrations.nvflare import FastAggAggregator, leave_out_of_job
from tests.integrations.nvflare_rounds import (
    BAD,
    ROUNDS,
    Aggregator,
    K,
    Model,
    answer,
    by_hand,
    context,
    first_model,
    run_round,
    same,
    trained,
)

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


# --- the rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [r for r in fastagg.available() if r not in ("scaffold", "mifa-client")]
)
def test_a_run_has_the_bits_of_a_loop(rule: str) -> None:
    aggregator, model = FastAggAggregator(rule, K), first_model()
    for number, clients in enumerate(ROUNDS):
        model = run_round(aggregator, model, number, clients)
    assert same(model, by_hand(rule))
    assert aggregator.last_report is not None and aggregator.last_report.error is None
    assert aggregator.last_report.active == (0, 1, 2, 3)


def test_options_of_the_rule_are_used() -> None:
    options = {"client_weights": [1, 2, 3, 4, 5], "server_lr": 0.5}
    names = [f"site-{client}" for client in range(K)]
    aggregator = FastAggAggregator("mifa", clients=names, rule_options=options)
    model = first_model()
    for number, clients in enumerate(ROUNDS[1:]):
        model = run_round(aggregator, model, number, clients)
    assert same(model, by_hand("mifa", ROUNDS[1:], **options))
    assert aggregator.last_report is not None
    assert aggregator.last_report.absent == {"site-4": 4}


def test_differences_give_the_same_model() -> None:
    aggregator = FastAggAggregator("mifa", K, expected_data_kind="WEIGHT_DIFF")
    model = first_model()
    for number, clients in enumerate(ROUNDS):
        model = run_round(aggregator, model, number, clients)
    # Each of four rounds rounds clients' differences, and the sum of model and difference.
    expected = by_hand("mifa")
    for name in model:
        np.testing.assert_allclose(model[name], expected[name], rtol=0, atol=4e-6)


@pytest.mark.parametrize("kind", ["WEIGHTS", "WEIGHT_DIFF"])
def test_fedavg_equals_the_aggregator_of_nvflare(kind: str) -> None:
    ours, theirs = first_model(), first_model()
    own = FastAggAggregator("fedavg", K, expected_data_kind=kind)
    other = InTimeAccumulateWeightedAggregator(expected_data_kind=kind)
    other.handle_event(EventType.START_RUN, context(theirs))
    for number in range(3):
        ours = run_round(own, ours, number, range(K))
        fl_ctx = context(dict(theirs), number)
        for client in range(K):
            data = trained(theirs, number, client)
            if kind == "WEIGHT_DIFF":
                data = {name: data[name] - theirs[name] for name in data}
            assert other.accept(answer(f"site-{client}", data, number, kind), fl_ctx)
        result = other.aggregate(fl_ctx)
        assert from_shareable(result).data_kind == kind
        generator = FullModelShareableGenerator()
        theirs = generator.shareable_to_learnable(result, fl_ctx)["weights"]
    # NVFlare averages models in float32 in the order of arrival, fastagg updates in float64.
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
        assert ours[name].dtype == theirs[name].dtype


# --- kinds of arrays ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["WEIGHTS", "WEIGHT_DIFF"])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_statistics_are_averaged_and_integers_stay(kind: str, as_tensors: bool) -> None:
    def form(model: Model) -> Model:
        if not as_tensors:
            return model
        return {name: torch.from_numpy(np.array(value)) for name, value in model.items()}

    base = {
        "w": np.zeros(2, np.float32),
        "bn.running_var": np.array([1.0, 4.0], np.float32),
        "bn.num_batches_tracked": np.array(7),
        "half": np.ones(1, np.float16),
        "double": np.ones((), np.float64),
    }
    aggregator = Aggregator("mifa", 3, expected_data_kind=kind)
    model = base
    for number, variances in enumerate([[2.0, 4.0, 9.0], [8.0], [4.0, 6.0]]):
        fl_ctx = context(form(model), number)
        for client, variance in enumerate(variances):
            data = {name: value + np.ones((), value.dtype) for name, value in model.items()}
            data["bn.running_var"] = np.full(2, variance, np.float32)
            if kind == "WEIGHT_DIFF":
                data = {name: data[name] - model[name] for name in data}
            assert aggregator.accept(answer(f"c{client}", form(data), number, kind), fl_ctx)
        result = aggregator.aggregate(fl_ctx)
        aggregator.reset(fl_ctx)
        learnable = FullModelShareableGenerator().shareable_to_learnable(result, fl_ctx)
        assert all(isinstance(v, Tensor) == as_tensors for v in learnable["weights"].values())
        model = {name: np.asarray(value) for name, value in learnable["weights"].items()}
        assert model["bn.running_var"].tolist() == [np.mean(variances)] * 2
        assert model["bn.num_batches_tracked"] == 7
        assert {name: v.dtype for name, v in model.items()} == {n: v.dtype for n, v in base.items()}
    assert model["w"].tolist() == [3.0, 3.0] and model["double"] == 4.0 and model["half"] == [4.0]


def test_roles_keep_arrays() -> None:
    model = first_model()
    after = run_round(FastAggAggregator("fedavg", K, roles={"b": "server"}), model, 0, [0, 1])
    assert np.array_equal(after["b"], model["b"]) and not np.array_equal(after["w"], model["w"])
    aggregator = FastAggAggregator("fedavg", K, roles={"b": "local"})
    fl_ctx = context(model)
    assert aggregator.accept(answer("site-0", {"w": model["w"] + 1}), fl_ctx)
    result = from_shareable(aggregator.aggregate(fl_ctx)).data
    assert result["b"] is model["b"] and np.array_equal(result["w"], model["w"] + 1)


def test_an_order_or_a_layout_in_memory_does_not_matter() -> None:
    model = first_model()
    expected = run_round(FastAggAggregator("fdms", K), model, 0, [0, 1])
    aggregator, fl_ctx = FastAggAggregator("fdms", K), context(model)
    for client in (1, 0):
        data = trained(model, 0, client)
        data = {"b": data["b"].astype(">f4"), "w": np.asfortranarray(data["w"])}
        assert aggregator.accept(answer(f"site-{client}", data), fl_ctx)
    assert same(from_shareable(aggregator.aggregate(fl_ctx)).data, expected)


# --- what is rejected ---------------------------------------------------------------------------


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_a_bad_answer_changes_nothing(data: object) -> None:
    aggregator, plain, model = Aggregator("mimic", K), FastAggAggregator("mimic", K), first_model()
    after = run_round(plain, model, 0, [0, 1])
    fl_ctx = context(dict(model))
    assert not aggregator.accept(answer("evil", data), fl_ctx)
    assert "rejected evil: " in aggregator.logged[-1] and len(aggregator.logged[-1]) < 600
    assert not aggregator.accept(answer("evil", trained(model, 0, 7)), fl_ctx)  # the first counts
    assert same(run_round(aggregator, model, 0, [0, 1]), after)
    assert aggregator.last_report is not None
    assert list(aggregator.last_report.rejected) == ["evil"]
    assert aggregator._core.ids.known == {"site-0": 0, "site-1": 1}
    for name, value in plain._core.aggregator.state_dict().items():
        assert torch.equal(aggregator._core.aggregator.state_dict()[name], value)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_values_that_are_not_usable_are_in_the_report(value: float) -> None:
    aggregator, plain, model = Aggregator("mimic", K), FastAggAggregator("mimic", K), first_model()
    after = run_round(plain, model, 0, [0, 1])
    bad = {**model, "w": np.full((2, 2), value, np.float32)}
    assert aggregator.accept(answer("site-2", bad), context(model))
    assert same(run_round(aggregator, model, 0, [0, 1]), after)
    (line,) = [line for line in aggregator.logged if line.startswith("rejected")]
    assert line.startswith("rejected site-2: update of client 2: ")
    for name, state in plain._core.aggregator.state_dict().items():
        assert torch.equal(aggregator._core.aggregator.state_dict()[name], state)


def broken(change: str) -> Shareable:
    shareable = answer("site-0", first_model())
    if change == "claims another name":
        shareable.set_peer_props({ReservedKey.IDENTITY_NAME: "site-1"})
    elif change == "no name":
        shareable.set_peer_props(None)
    elif change == "no client":
        shareable.set_header(ServerCommandKey.FL_CLIENT, None)
    elif change == "a client that is text":
        shareable.set_header(ServerCommandKey.FL_CLIENT, "site-0")
    elif change == "no round":
        shareable.set_cookie_jar(None)
    elif change == "cookies that are a list":
        shareable.set_cookie_jar([1])
    elif change == "headers that are a list":
        shareable["__headers__"] = [1]
    elif change == "an error":
        shareable.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    elif change == "no DXO":
        shareable["DXO"] = "x"
    elif change == "another kind":
        shareable["DXO"]["kind"] = "WEIGHT_DIFF"
    elif change == "a kind that is a list":
        shareable["DXO"]["kind"] = ["WEIGHTS"]
    elif change == "another content":
        shareable.set_header("__content_type__", "pickle")
    return shareable


@pytest.mark.parametrize(
    "change",
    [
        "claims another name",
        "no name",
        "no client",
        "a client that is text",
        "no round",
        "cookies that are a list",
        "headers that are a list",
        "an error",
        "no DXO",
        "another kind",
        "a kind that is a list",
        "another content",
    ],
)
def test_a_broken_message_is_rejected(change: str) -> None:
    aggregator, fl_ctx = Aggregator("mifa", K), context(first_model())
    assert not aggregator.accept(broken(change), fl_ctx)
    assert len(aggregator.logged) == 1 and aggregator.logged[0].startswith("rejected ")
    assert aggregator.accept(answer("site-1", first_model()), fl_ctx)  # not its fault


@pytest.mark.parametrize("number", [0, 2, -1, "1", None, True, 1.0, [1]])
def test_answers_of_other_rounds_are_rejected(number: object) -> None:
    aggregator, model = Aggregator("mifa", K), first_model()
    fl_ctx = context(model, 1)
    assert not aggregator.accept(answer("site-0", model, number), fl_ctx)
    assert aggregator.accept(answer("site-0", model, 1), fl_ctx)


def test_a_late_answer_is_not_kept_for_the_next_round() -> None:
    aggregator, model = Aggregator("mifa", K), first_model()
    fl_ctx = context(model, 3)
    assert aggregator.accept(answer("site-0", model, 3), fl_ctx)
    aggregator.aggregate(fl_ctx)
    assert not aggregator.accept(answer("site-1", model, 3), fl_ctx)
    assert "late" in aggregator.logged[-1]
    aggregator.reset(fl_ctx)
    run_round(aggregator, model, 4, [0])
    assert aggregator.last_report is not None and aggregator.last_report.active == (0,)


def test_reset_forgets_answers_and_opens_the_same_round_again() -> None:
    aggregator, model = Aggregator("mifa", K), first_model()
    assert aggregator.accept(answer("site-4", model), context(model))
    aggregator.reset(context(model))  # a workflow ended before it aggregated
    for _ in range(2):  # two workflows with one round each
        run_round(aggregator, model, 0, [0, 1])
        assert aggregator.last_report is not None
        assert [*aggregator.last_report.ids] == ["site-0", "site-1"]


def test_nothing_larger_than_the_model_is_copied() -> None:
    aggregator, model = Aggregator("mifa", K), first_model()
    assert not aggregator.accept(answer("evil", BAD["far too much"]), context(model))
    assert "expected at most 28 bytes" in aggregator.logged[-1]


def test_only_known_clients_take_part() -> None:
    model = first_model()
    named = Aggregator("mifa", clients=["b", "a"])
    assert not named.accept(answer("c", model), context(model))
    assert named.accept(answer("a", model), context(model))
    named.aggregate(context(model))
    assert named.last_report is not None
    assert named.last_report.ids == {"a": 1} and named.last_report.absent == {"b": None}
    counted = Aggregator("mifa", 2)
    run_round(counted, model, 0, [4, 3])
    run_round(counted, model, 1, [0, 3])
    assert counted.last_report is not None
    assert counted.last_report.active == (0,)
    assert "all 2 are taken" in counted.last_report.rejected["site-0"]


def test_rounds_without_enough_answers_keep_the_model() -> None:
    aggregator, model = Aggregator("fedavg", K, min_answers=2, max_empty_rounds=2), first_model()
    assert same(run_round(aggregator, model, 0, [0]), model)
    assert "the model stays as it was" in aggregator.logged[-1]
    with pytest.raises(RuntimeError, match="max_empty_rounds"):
        run_round(aggregator, model, 1, [])
    assert aggregator.last_report is not None and aggregator.last_report.round == 2
    assert aggregator.logged[-2].startswith("round 2: 0 active")
    differences = FastAggAggregator("fedavg", K, expected_data_kind="WEIGHT_DIFF")
    assert same(run_round(differences, model, 0, []), model)
    double = {"w": np.array([1 / 3])}  # not a float32
    assert same(run_round(FastAggAggregator("fedavg", K), double, 0, []), double)


@pytest.mark.parametrize(
    ("kind", "before", "sent"),
    [
        ("WEIGHTS", 40_000, 60_000),
        ("WEIGHT_DIFF", 40_000, 20_000),
        ("WEIGHT_DIFF", -40_000, 40_000),  # the model would be in the range, not the difference
    ],
)
def test_a_round_beyond_float16_keeps_the_model(kind: str, before: int, sent: int) -> None:
    options = {"server_lr": 2.0, "max_norm": None}
    aggregator = Aggregator("fedavg", K, rule_options=options, expected_data_kind=kind)
    model = {"w": np.full(2, before, np.float16)}
    fl_ctx = context(model)
    message = answer("site-0", {"w": np.full(2, sent, np.float16)}, 0, kind)
    assert aggregator.accept(message, fl_ctx)
    result = aggregator.aggregate(fl_ctx)
    found = FullModelShareableGenerator().shareable_to_learnable(result, fl_ctx)["weights"]
    assert same(found, model)
    assert "the model stays as it was: array 'w'" in aggregator.logged[-1]


@pytest.mark.parametrize("model", [{}, None, {"w": np.full(2, np.nan, np.float32)}, {"w": "x"}])
def test_without_a_usable_global_model_the_job_ends(model: object) -> None:
    aggregator, fl_ctx = Aggregator("fedavg", K), context(model)
    assert not aggregator.accept(answer("site-0", {"w": np.zeros(3, np.float32)}), fl_ctx)
    with pytest.raises(ValueError, match="expected"):
        aggregator.aggregate(fl_ctx)


# --- restarts -----------------------------------------------------------------------------------


def start(aggregator: Aggregator) -> Aggregator:
    aggregator.handle_event(EventType.START_RUN, context({}))
    return aggregator


@pytest.mark.parametrize("rule", ["mifa", "fdms", "mimic"])
def test_the_second_half_continues_the_first(rule: str, tmp_path: Path) -> None:
    options = {"checkpoint_path": tmp_path / "run.safetensors", "checkpoint_every": 2}
    model, first = first_model(), start(Aggregator(rule, K, **options))
    for number, clients in enumerate(ROUNDS[:3]):
        model = run_round(first, model, number, clients)
    first.handle_event(EventType.END_RUN, context({}))  # writes the third round
    second = start(Aggregator(rule, K, resume=True, **options))
    model = run_round(second, model, 3, ROUNDS[3])
    assert same(model, by_hand(rule))
    assert second._core.rounds == 4 and second._core.ids.known == first._core.ids.known
    assert not any("is not that of the checkpoint" in line for line in second.logged)
    assert not hasattr(first, "panics") and not hasattr(second, "panics")


def test_another_model_than_that_of_the_checkpoint_is_reported(tmp_path: Path) -> None:
    options = {"checkpoint_path": tmp_path / "run.safetensors", "resume": True}
    first = start(Aggregator("mifa", K, **options))
    assert "the rule starts afresh" in first.logged[-1]
    run_round(first, first_model(), 0, [0, 1])
    second = start(Aggregator("mifa", K, **options))
    run_round(second, first_model(), 1, [0, 1])
    assert sum("is not that of the checkpoint" in line for line in second.logged) == 1


def test_a_checkpoint_that_does_not_fit_ends_the_job(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    first = start(Aggregator("mifa", clients=["site-0", "site-1"], checkpoint_path=path))
    run_round(first, first_model(), 0, [0, 1])
    kind, content, state = checkpoint.read(path)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("fdms", {"clients": ["site-0", "site-1"]}),
        ("mifa", {"clients": ["site-1", "site-0"]}),
        ("mifa", {"clients": ["site-0", "site-1"], "roles": {"b": "server"}}),
    ]
    for rule, options in cases:
        other = start(Aggregator(rule, checkpoint_path=path, resume=True, **options))
        assert len(other.panics) == 1 and "expected" in other.panics[0]
        run_round(other, first_model(), 1, [0, 1])  # NVFlare may still end the round
        assert checkpoint.read(path)[1] == content
    checkpoint.write(path, kind, {**content, "ids": {"known": {"a": 9}, "given": []}}, state)
    assert start(Aggregator("mifa", 2, checkpoint_path=path, resume=True)).panics
    path.write_bytes(b"not a checkpoint")
    assert start(Aggregator("mifa", 2, checkpoint_path=path, resume=True)).panics
    gone = tmp_path / "none" / "run.safetensors"
    assert "there is no folder" in start(Aggregator("mifa", 2, checkpoint_path=gone)).panics[0]


def test_a_checkpoint_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    aggregator = start(Aggregator("mifa", K, checkpoint_path=folder / "run.safetensors"))
    folder.rmdir()
    model = run_round(aggregator, first_model(), 0, [0, 1])
    assert "the checkpoint was not written" in aggregator.logged[-1]
    folder.mkdir()
    run_round(aggregator, model, 1, [0, 1])
    assert (folder / "run.safetensors").is_file()


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"rule": "scaffold"}, ValueError, "control variates"),
        ({"rule": "mimic", "rule_options": {"mode": "client"}}, ValueError, "mode 'server'"),
        ({"rule": "fedavgg"}, ValueError, "fedavg"),
        ({"rule": None}, TypeError, "rule: expected a name"),
        ({"rule_options": {"mu": 1.0}}, TypeError, "mu"),
        ({"rule_options": {"num_params": 3}}, ValueError, "num_params"),
        ({"rule_options": {"nonfinite": "raise"}}, ValueError, "nonfinite"),
        ({"rule_options": [1]}, TypeError, "rule_options"),
        ({"rule_options": {"weighted": True}}, ValueError, r"rule_options.*\['weighted'\]"),
        ({"rule_options": {"max_clients": 9}}, ValueError, "rule_options.*max_clients"),
        ({"rule_options": {"selection": "random"}}, ValueError, "rule_options.*selection"),
        ({"rule_options": {"checkpoint_path": "/a"}}, ValueError, "rule_options.*checkpoint"),
        ({"rule_options": {"staleness": "constant"}}, ValueError, "rule_options.*late answers"),
        ({"rule_options": {"max_staleness": 5}}, ValueError, "rule_options.*late answers"),
        ({"num_clients": None}, TypeError, "num_clients"),
        ({"num_clients": 0}, ValueError, "num_clients"),
        ({"clients": ["a", "b"]}, ValueError, "num_clients: expected 2"),
        ({"clients": ["a", "a"]}, ValueError, "different"),
        ({"clients": "abc"}, TypeError, "clients"),
        ({"expected_data_kind": "METRICS"}, ValueError, "expected_data_kind"),
        ({"checkpoint_path": "run.safetensors"}, ValueError, "absolute"),
        ({"resume": True}, ValueError, "checkpoint_path"),
        ({"roles": {"w": "mine"}}, ValueError, "roles"),
        ({"min_answers": -1}, ValueError, "min_answers"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        FastAggAggregator(**{"rule": "fedavg", "num_clients": 3, **arguments})


def test_the_job_api_stores_the_arguments(tmp_path: Path) -> None:
    arguments = {
        "rule": "mifa",
        "rule_options": {"client_weights": [1, 2], "server_lr": 0.5},
        "clients": ["b", "a"],
        "expected_data_kind": "WEIGHT_DIFF",
        "min_answers": 1,
        "max_empty_rounds": 3,
        "checkpoint_path": str(tmp_path / "run.safetensors"),
        "checkpoint_every": 5,
        "checkpoint_keep": 1,
        "resume": True,
        "roles": {"*.head": "server", "*": "rule"},
    }
    job = FedJob(name="stored", min_clients=1)
    leave_out_of_job(job)
    job.to_server(FastAggAggregator(**arguments), id="aggregator")
    job.export_job(str(tmp_path))
    files = [*(tmp_path / "stored").rglob("config_fed_server.json")]
    (component,) = json.loads(files[0].read_text())["components"]
    assert component["path"] == "fastagg.integrations.nvflare.FastAggAggregator"
    assert component["args"] == arguments
    FastAggAggregator(**component["args"])
    assert not [*(tmp_path / "stored").rglob("*.py")]  # fastagg is not copied into the job
