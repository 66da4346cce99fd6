# SPDX-License-Identifier: Apache-2.0
"""The adapter for NVIDIA FLARE: by direct calls, and in jobs that NVFlare's simulator runs.

tests/pages/test_nvflare_page.py runs another job, with ``fdms`` and clients that are executors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import checkpoint

pytest.importorskip("nvflare", reason="nvflare is not installed (make test-flower installs it)")

from nvflare.apis.client import Client
from nvflare.apis.dxo import DXO, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReservedKey, ReturnCode, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.aggregators.intime_accumulate_model_aggregator import (
    InTimeAccumulateWeightedAggregator,
)
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.shareablegenerators.full_model_shareable_generator import (
    FullModelShareableGenerator,
)
from nvflare.job_config.api import FedJob

from fastagg.integrations.nvflare import FastAggAggregator, leave_out_of_job
from tests.scripts import run_script

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

K = 5
Model = dict[str, Any]


class Aggregator(FastAggAggregator):
    """Keeps what it logs, and what would end the job."""

    def log_info(self, fl_ctx: FLContext, msg: str, fire_event: bool = False) -> None:
        self.__dict__.setdefault("logged", []).append(msg)

    log_warning = log_error = log_info

    def system_panic(self, reason: str, fl_ctx: FLContext) -> None:
        self.__dict__.setdefault("panics", []).append(reason)


def context(model: object, number: int = 0) -> FLContext:
    """Return the context of a round as ScatterAndGather makes it."""
    fl_ctx = FLContext()
    learnable = make_model_learnable(model, {})
    fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, learnable, private=True, sticky=True)
    fl_ctx.set_prop(AppConstants.CURRENT_ROUND, number, private=True, sticky=True)
    return fl_ctx


def answer(name: str, data: object, number: object = 0, kind: str = "WEIGHTS") -> Shareable:
    """Return the answer of a client as NVFlare's server passes it on."""
    shareable = DXO(kind, data={}).to_shareable()
    shareable["DXO"]["data"] = data
    shareable.set_header(ServerCommandKey.FL_CLIENT, Client(name, f"token of {name}"))
    shareable.set_peer_props({ReservedKey.IDENTITY_NAME: name})
    shareable.add_cookie(AppConstants.CONTRIBUTION_ROUND, number)
    return shareable


def first_model() -> Model:
    rng = np.random.default_rng(1)
    return {
        "w": rng.standard_normal((2, 2)).astype(np.float32),
        "b": rng.standard_normal(3).astype(np.float32),
    }


def trained(model: Model, number: int, client: int) -> Model:
    rng = np.random.default_rng([number, client])
    return {
        name: value + rng.standard_normal(value.shape).astype(np.float32)
        for name, value in model.items()
    }


def flat(model: Model) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(v).ravel() for v in model.values()]))


def run_round(
    aggregator: FastAggAggregator, model: Model, number: int, clients: Iterable[int]
) -> Model:
    """Run a round with ``clients``; return what the shareable generator makes of the result."""
    fl_ctx = context(dict(model), number)
    differ = aggregator.expected_data_kind == "WEIGHT_DIFF"
    for client in clients:
        data = trained(model, number, client)
        if differ:
            data = {name: data[name] - model[name] for name in data}
        message = answer(f"site-{client}", data, number, aggregator.expected_data_kind)
        assert aggregator.accept(message, fl_ctx)
    result = aggregator.aggregate(fl_ctx)
    aggregator.reset(fl_ctx)
    assert from_shareable(result).data_kind == aggregator.expected_data_kind
    return FullModelShareableGenerator().shareable_to_learnable(result, fl_ctx)["weights"]


ROUNDS = [[0, 1, 2, 3, 4], [1, 3, 0, 4], [4, 2, 1, 0], [0, 1, 2, 3]]


def by_hand(rule: str, rounds: list[list[int]] = ROUNDS, **options: Any) -> Model:
    agg = fastagg.make(rule, num_clients=K, num_params=7, nonfinite="drop", **options)
    model = first_model()
    for number, clients in enumerate(rounds):
        params = flat(model)
        agg.step(params, [flat(trained(model, number, c)) - params for c in clients], clients)
        model = {"w": params[:4].view(2, 2).numpy(), "b": params[4:].numpy()}
    return model


def same(a: Model, b: Model) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


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

W, B = np.zeros((2, 2), np.float32), np.zeros(3, np.float32)
BAD: dict[str, Any] = {
    "a missing array": {"w": W},
    "an unknown array": {"w": W, "b": B, "c": B},
    "a wrong shape": {"w": W.T.reshape(4), "b": B},
    "a wrong dtype": {"w": W.astype(np.float64), "b": B},
    "an object": {"w": W, "b": np.array([{}, None, "x"], object)},
    "a text": {"w": W, "b": "import os"},
    "a list": {"w": W, "b": [0.0, 0.0, 0.0]},
    "strings": {"w": W, "b": np.array(["a", "b", "c"])},
    "complex numbers": {"w": W, "b": B.astype(np.complex64)},
    "a sparse tensor": {"w": torch.zeros(2, 2).to_sparse(), "b": B},
    "bfloat16": {"w": W, "b": torch.zeros(3, dtype=torch.bfloat16)},
    "a tensor without values": {"w": W, "b": torch.zeros(3, device="meta")},
    "a name that is a number": {1: W, "b": B},
    "far too much": {"w": np.broadcast_to(np.float32(0), (1 << 20, 1 << 20)), "b": B},
    "a very long name": {"w" * 100_000: W, "b": B},
    "nothing": {},
    "no dict": [W, B],
    "None": None,
}


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
    differences = FastAggAggregator("fedavg", K, expected_data_kind="WEIGHT_DIFF")
    assert same(run_round(differences, model, 0, []), model)
    double = {"w": np.array([1 / 3])}  # not a float32
    assert same(run_round(FastAggAggregator("fedavg", K), double, 0, []), double)


@pytest.mark.parametrize("model", [{}, None, {"w": np.full(2, np.nan, np.float32)}, {"w": "x"}])
def test_without_a_usable_global_model_the_job_ends(model: object) -> None:
    aggregator, fl_ctx = Aggregator("fedavg", K), context(model)
    assert not aggregator.accept(answer("site-0", {"w": B}), fl_ctx)
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


# --- the controller of recipes ------------------------------------------------------------------


class Engine:
    """NVFlare's server, which knows some clients."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def get_clients(self) -> list[Client]:
        return [Client(name, f"token of {name}") for name in self.names]


def fetch(
    aggregator: FastAggAggregator, model: object, *names: object, engine: Engine | None = None
) -> None:
    """Fire the events of a round in which clients fetch their tasks, under their own names."""
    aggregator.reset_stats()
    for name in names:
        fl_ctx, peer = FLContext(), FLContext()
        fl_ctx.set_prop(ReservedKey.ENGINE, engine, private=True)
        peer.set_prop(ReservedKey.IDENTITY_NAME, name, private=False)
        fl_ctx.set_peer_context(peer)
        task = DXO("WEIGHTS", data=model).to_shareable()
        fl_ctx.set_prop(AppConstants.TRAIN_SHAREABLE, task, private=True, sticky=False)
        aggregator.handle_event(AppEventType.BEFORE_TRAIN_TASK, fl_ctx)


def fl_model(name: object, params: object, **options: Any) -> FLModel:
    """Return the answer of a client as the controller FedAvg passes it on."""
    return FLModel(params=params, meta={"client_name": name}, **options)


@pytest.mark.parametrize("kind", [ParamsType.FULL, ParamsType.DIFF])
def test_a_recipe_has_the_bits_of_a_loop(kind: ParamsType) -> None:
    data_kind = "WEIGHTS" if kind == ParamsType.FULL else "WEIGHT_DIFF"
    aggregator, model = Aggregator("mifa", K, expected_data_kind=data_kind), first_model()
    assert isinstance(aggregator, ModelAggregator)  # NVFlare would replace another one by its own
    expected = by_hand("mifa")
    for number, clients in enumerate(ROUNDS):
        fetch(aggregator, model, *[f"site-{client}" for client in range(K)])
        for client in clients:
            data = trained(model, number, client)
            if kind == ParamsType.DIFF:
                data = {name: data[name] - model[name] for name in data}
            answer = fl_model(f"site-{client}", data, params_type=kind, metrics={"m": client})
            aggregator.accept_model(answer)
        result = aggregator.aggregate_model()
        assert result.params_type == kind and result.metrics == {"m": np.mean(clients)}
        if kind == ParamsType.FULL:
            model = result.params
        else:
            model = {name: model[name] + result.params[name] for name in model}
        assert aggregator.last_report is not None and aggregator.last_report.error is None
        assert aggregator.last_report.active == tuple(sorted(clients))
        assert {*aggregator.last_report.absent.values()} == {*range(K)} - {*clients}
    for name in model:
        np.testing.assert_allclose(
            model[name], expected[name], rtol=0, atol=0 if kind == ParamsType.FULL else 4e-6
        )


def test_bad_answers_in_a_recipe_change_nothing() -> None:
    model = first_model()
    plain = FastAggAggregator("mimic", K)
    after = run_round(plain, model, 0, [0, 1])
    for data in BAD.values():
        aggregator = Aggregator("mimic", K)
        fetch(aggregator, model, "site-0", "site-1", "evil")
        if data is not None:
            with pytest.raises(ValueError, match=r"^evil: "):
                aggregator.accept_model(fl_model("evil", data))
        for client in (0, 1):
            aggregator.accept_model(fl_model(f"site-{client}", trained(model, 0, client)))
        assert same(aggregator.aggregate_model().params, after)
    with pytest.raises(ValueError, match="already"):
        aggregator.accept_model(fl_model("site-0", model))
        aggregator.accept_model(fl_model("site-0", model))
    for name in (None, "", 3):
        with pytest.raises(ValueError, match="client's name"):
            aggregator.accept_model(fl_model(name, model))
    with pytest.raises(ValueError, match="params_type"):
        aggregator.accept_model(fl_model("site-3", model, params_type=ParamsType.DIFF))


@pytest.mark.parametrize("name", [7, None, "", 1.5, [1], {"a": 1}, b"site-3", ("site-3",)])
def test_a_client_with_a_name_that_is_no_text_changes_nothing(name: object) -> None:
    aggregator, model = Aggregator("mifa", K), first_model()
    after = run_round(FastAggAggregator("mifa", K), model, 0, [0, 1])
    fetch(aggregator, model, "site-0", "site-1", "site-2", name)
    for client in (0, 1):
        aggregator.accept_model(fl_model(f"site-{client}", trained(model, 0, client)))
    assert same(aggregator.aggregate_model().params, after)
    assert aggregator.last_report is not None
    assert aggregator.last_report.absent == {"site-2": None}


def test_names_that_the_server_does_not_know_are_not_absent() -> None:
    aggregator, model = Aggregator("fedavg", K), first_model()
    engine = Engine("site-0", "site-1")
    invented = [f"site-{number}" for number in range(2, 50)]
    fetch(aggregator, model, "site-0", "site-1", *invented, engine=engine)
    aggregator.accept_model(fl_model("site-0", model))
    aggregator.aggregate_model()
    assert aggregator.last_report is not None
    assert aggregator.last_report.absent == {"site-1": None}


def test_metrics_that_are_no_finite_numbers_are_left_out() -> None:
    aggregator, model = Aggregator("fedavg", K), first_model()
    sent: list[dict[Any, Any] | None] = [
        {"a": 1, "b": np.float32(2.0), "c": "x", 5: 1.0},
        {"a": float("nan"), "b": 4.0, "c": [1.0]},
        {"a": 10**400, "b": True, "c": 1j},
        None,
    ]
    fetch(aggregator, model, *[f"site-{client}" for client in range(K)])
    for client, metrics in enumerate(sent):
        aggregator.accept_model(fl_model(f"site-{client}", model, metrics=metrics))
    assert aggregator.aggregate_model().metrics == {"a": 1.0, "b": 3.0}


def means(sent: list[Any]) -> dict[str, float] | None:
    """Return the metrics of a round whose clients send these."""
    aggregator, model = Aggregator("fedavg", len(sent)), first_model()
    fetch(aggregator, model, *[f"site-{client}" for client in range(len(sent))])
    for client, metrics in enumerate(sent):
        answer = fl_model(f"site-{client}", model)
        answer.metrics = metrics
        aggregator.accept_model(answer)
    found: dict[str, float] | None = aggregator.aggregate_model().metrics
    assert aggregator.last_report is not None and len(aggregator.last_report.active) == len(sent)
    return found


HUGE = np.finfo(np.float64).max


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.7e308, 1.7e308], 1.7e308),
        ([1.0, 1.0, 1.7e308, 1.7e308], 8.5e307),
        ([HUGE] * 3, HUGE),
        ([-HUGE] * 7, -HUGE),
        ([HUGE, HUGE, -HUGE, -HUGE], 0.0),
        ([0.1, 0.2, 0.3, 0.4], 0.25),
    ],
)
def test_the_mean_of_finite_metrics_is_finite(values: list[float], expected: float) -> None:
    found = means([{"loss": value} for value in values])
    assert found is not None and found["loss"] == pytest.approx(expected, rel=1e-15)


def test_one_client_cannot_add_metrics_or_end_the_job_with_them() -> None:
    many = {f"m{number}": 1.0 for number in range(50_000)}
    assert means([{"loss": 1.0}, {"loss": 2.0}, {**many, "x" * 10_000: 1.0}]) == {"loss": 1.5}
    found = means([many, many])
    assert found is not None and len(found) == 1000
    assert means([{"x" * 10_000: 1.0}] * 2) is None
    for metrics in ([1.0], "loss", 5, {1: 2.0, None: 1.0, ("a",): 3.0}):
        assert means([{"loss": 1.0}, metrics]) == {"loss": 1.0}


def test_rounds_of_a_recipe_without_answers() -> None:
    model = first_model()
    for kind in ("WEIGHTS", "WEIGHT_DIFF"):
        aggregator = Aggregator("fedavg", K, expected_data_kind=kind, max_empty_rounds=2)
        fetch(aggregator, model)
        with pytest.raises(RuntimeError, match="no client has fetched"):
            aggregator.aggregate_model()
        fetch(aggregator, model, "site-0")
        result = aggregator.aggregate_model()
        assert same(result.params, model if kind == "WEIGHTS" else {}) and result.metrics is None
        fetch(aggregator, model, "site-0")
        with pytest.raises(RuntimeError, match="max_empty_rounds"):
            aggregator.aggregate_model()
    fetch(aggregator, {}, "site-0")
    with pytest.raises(ValueError, match="expected a model with weights"):
        aggregator.aggregate_model()


# --- a job --------------------------------------------------------------------------------------

CLIENT = """
import numpy as np
import nvflare.client as flare


def train(weights, site, number):
    rng = np.random.default_rng([site, number])
    return weights + rng.standard_normal(weights.shape).astype(np.float32)


def main():
    flare.init()
    site = int(flare.get_site_name().removeprefix("site-"))
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        params = {"numpy_key": train(model.params["numpy_key"], site, model.current_round)}
        if site == 2 and model.current_round == 1:
            params = {}  # nothing
        flare.send(flare.FLModel(params=params))


if __name__ == "__main__":
    main()
"""

# Three workflows, one after another: mifa with an absent client; fedavg; NVFlare's own aggregator.
JOB = """
from nvflare.app_common.aggregators.intime_accumulate_model_aggregator import (
    InTimeAccumulateWeightedAggregator,
)
from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.app_common.shareablegenerators.full_model_shareable_generator import (
    FullModelShareableGenerator,
)
from nvflare.app_common.workflows.scatter_and_gather import ScatterAndGather
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

from fastagg.integrations.nvflare import FastAggAggregator, leave_out_of_job

job = FedJob(name="three", min_clients=3)
leave_out_of_job(job)
job.to_server(FullModelShareableGenerator(), id="shareable_generator")
for name, aggregator, first, rounds in [
    ("mifa", FastAggAggregator("mifa", 3, rule_options={"client_weights": [1, 2, 4]}), 0, 3),
    ("fedavg", FastAggAggregator("fedavg", 3), 4, 1),
    ("theirs", InTimeAccumulateWeightedAggregator(expected_data_kind="WEIGHTS"), 4, 1),
]:
    job.to_server(aggregator, id=name)
    job.to_server(NPModelPersistor(model_name=name + ".npy"), id=name + "_persistor")
    job.to_server(
        ScatterAndGather(
            num_rounds=rounds,
            start_round=first,
            min_clients=1,
            wait_time_after_min_received=60,
            persistor_id=name + "_persistor",
            aggregator_id=name,
            task_check_period=0.05,
        )
    )
job.to_clients(ScriptRunner(script="client.py", framework=FrameworkType.NUMPY))
raise SystemExit(job.simulator_run("run", n_clients=3, threads=3))
"""


def loop_of_clients(rule: str, rounds: dict[int, list[int]], **options: Any) -> np.ndarray:
    """Return the model after a loop with the clients that are active in each round."""
    names: dict[str, Any] = {"__name__": "client", "flare": None}
    exec(CLIENT.replace("import nvflare.client as flare", ""), names)
    agg = fastagg.make(rule, num_clients=3, num_params=9, **options)
    params = torch.arange(1.0, 10.0)  # the first model of NPModelPersistor
    for number, active in rounds.items():
        models = [names["train"](params.numpy(), client + 1, number) for client in active]
        agg.step(params, [torch.from_numpy(m) - params for m in models], active)
    return params.view(3, 3).numpy()


@pytest.mark.slow
def test_a_job_has_the_bits_of_a_loop(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT, encoding="utf-8")
    run_script(JOB, tmp_path, name="job.py")
    models = tmp_path / "run" / "server" / "simulate_job" / "models"
    found = {name: np.load(models / f"{name}.npy") for name in ("mifa", "fedavg", "theirs")}

    rounds = {0: [0, 1, 2], 1: [0, 2], 2: [0, 1, 2]}
    assert np.array_equal(found["mifa"], loop_of_clients("mifa", rounds, client_weights=[1, 2, 4]))
    assert np.array_equal(found["fedavg"], loop_of_clients("fedavg", {4: [0, 1, 2]}))
    # NVFlare averages models in float32 in the order of arrival, fastagg updates in float64.
    np.testing.assert_allclose(found["theirs"], found["fedavg"], rtol=1e-5)
    log = (tmp_path / "run" / "server" / "log.txt").read_text(encoding="utf-8")
    assert "rejected site-2: array" in log and "round 2: 2 active: 0, 2" in log


# The shape of NVFlare's hello-world: a recipe, and clients that use the Client API.
RECIPE = """
import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe import SimEnv

from fastagg.integrations.nvflare import FastAggAggregator, leave_out_of_job

recipe = NumpyFedAvgRecipe(
    name="hello",
    model=np.arange(1.0, 10.0, dtype=np.float32).reshape(3, 3).tolist(),
    min_clients=3,
    num_rounds=3,
    train_script="client.py",
    aggregator=FastAggAggregator("RULE", num_clients=3),
)
leave_out_of_job(recipe)
run = recipe.execute(SimEnv(num_clients=3, num_threads=3, workspace_root="run"))
print("status:", run.get_status())
"""


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fdms", "mifa"])
def test_a_recipe_runs_in_the_simulator(rule: str, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT, encoding="utf-8")
    run_script(RECIPE.replace("RULE", rule), tmp_path, name="job.py")
    (found,) = (tmp_path / "run").rglob("models/server.npy")
    rounds = {0: [0, 1, 2], 1: [0, 2], 2: [0, 1, 2]}  # site-2 sends nothing in round 1
    assert np.array_equal(np.load(found), loop_of_clients(rule, rounds))
    (log,) = (tmp_path / "run").rglob("server/**/log.txt")
    assert "absent: client 1 (site-2)" in log.read_text(encoding="utf-8")
