# SPDX-License-Identifier: Apache-2.0
"""The registry, the options that all rules share, and the report."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import fastagg
from fastagg import FDMS, Aggregator, FedAvg
from fastagg.registry import register


def test_make_and_the_class_are_the_same() -> None:
    agg = fastagg.make("fdms", num_clients=3, num_params=2, server_lr=0.5, device="cpu")
    assert type(agg) is FDMS
    assert agg.name == "fdms"
    assert repr(agg) == "FDMS(num_clients=3, num_params=2, server_lr=0.5)"


def test_an_unknown_rule_gets_suggestions() -> None:
    with pytest.raises(ValueError, match=r"name: expected one of .*'fdsm'.* Did you mean 'fdms'"):
        fastagg.make("fdsm", num_clients=3, num_params=2)


def test_an_unknown_option_gets_the_valid_ones() -> None:
    match = r"'amplified' has no option\(s\) \['betta'\]; it has .*'beta', 'sequential'"
    with pytest.raises(TypeError, match=match):
        fastagg.make("amplified", num_clients=3, num_params=2, betta=1.0)


def test_a_missing_option() -> None:
    match = r"^rule 'scaffold': expected the option\(s\) \['num_params', 'local_work'\]"
    with pytest.raises(TypeError, match=match):
        fastagg.make("scaffold", num_clients=3)
    match = r"^rule 'scaffold': expected the option\(s\) \['local_work'\]"
    with pytest.raises(TypeError, match=match):
        fastagg.plan("scaffold", num_clients=3, num_active=1, num_params=2)


@pytest.mark.parametrize("name", [None, 3, ["fdms"], {"rule": "fdms"}])
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"^name: expected one of "):
        fastagg.make(name, num_clients=3, num_params=2)


def test_a_name_can_be_registered_once() -> None:
    with pytest.raises(ValueError, match=r"name: .*'fedavg'.*already"):
        register("fedavg")(FedAvg)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_clients": 0}, ValueError, "num_clients: expected at least 1, got 0"),
        ({"num_clients": 2.0}, TypeError, "num_clients: expected an int"),
        ({"num_params": True}, TypeError, "num_params: expected an int"),
        ({"num_params": -3}, ValueError, "num_params: expected at least 1"),
        ({"server_lr": -0.1}, ValueError, "server_lr: .*got -0.1"),
        ({"server_lr": math.nan}, ValueError, "server_lr: .*got nan"),
        ({"server_lr": math.inf}, ValueError, "server_lr: .*got inf"),
        ({"server_lr": "1"}, TypeError, "server_lr: expected a number, got '1'"),
        ({"device": "meta"}, ValueError, "device: expected 'cpu'"),
        ({"device": "toaster"}, ValueError, "device: expected 'cpu', got 'toaster'"),
        ({"device": 10**30}, ValueError, "device: expected 'cpu', got 1000"),
        ({"nonfinite": "ignore"}, ValueError, 'nonfinite: expected "raise" or "drop"'),
        ({"client_weights": [1.0]}, ValueError, r"client_weights: .*shape \[2\]"),
        ({"client_weights": [0.0, 0.0]}, ValueError, "client_weights: .*all zeros"),
        ({"client_weights": [1.0, -1.0]}, ValueError, "client_weights: .*>= 0, got -1.0"),
        ({"client_weights": [1.0, math.nan]}, ValueError, "client_weights: .*finite"),
        ({"client_weights": [1.0, math.inf]}, ValueError, "client_weights: .*finite"),
        ({"client_weights": "ab"}, TypeError, "client_weights: expected 2 numbers"),
    ],
)
@pytest.mark.parametrize("name", ["fedavg", "fdms", "mifa", "stale"])
def test_bad_options(
    name: str, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        fastagg.make(name, **({"num_clients": 2, "num_params": 1} | options))


@pytest.mark.parametrize("number", [2, np.float32(2.0), np.int64(2)])
def test_numbers_of_numpy_are_numbers(number: Any) -> None:
    assert FedAvg(num_clients=2, num_params=1, server_lr=number).server_lr == 2.0


@pytest.mark.parametrize("weights", [[1, 3], (1.0, 3.0), np.array([1, 3]), torch.tensor([1, 3])])
def test_forms_of_client_weights(weights: Any) -> None:
    agg = FedAvg(num_clients=2, num_params=1, client_weights=weights)
    params = torch.zeros(1)
    agg.step(params, torch.tensor([[4.0], [8.0]]), [0, 1])
    assert params.tolist() == [7.0]


@pytest.mark.parametrize(
    "clients", [[1, 0], (1, 0), torch.tensor([1, 0]), [np.int64(1), np.int32(0)], range(1, -1, -1)]
)
def test_forms_of_clients(clients: Any) -> None:
    agg = FedAvg(num_clients=2, num_params=1, client_weights=[1, 3])
    params = torch.zeros(1)
    agg.step(params, torch.tensor([[4.0], [8.0]]), clients)
    assert params.tolist() == [5.0]


def test_the_report_is_frozen() -> None:
    report = FedAvg(num_clients=2, num_params=1).step(torch.zeros(1), torch.ones(1, 1), [1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.skipped = True  # type: ignore[misc]
    assert report.active.dtype == report.rejected.dtype == torch.int64
    assert report.weights.dtype == torch.float32


def test_a_user_defined_aggregator() -> None:
    class Nothing(Aggregator):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing(num_clients=1, num_params=1)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"lr": 0.5}, "Did you mean server_lr= for lr=?"),
        ({"n_clients": 4}, "Did you mean num_clients= for n_clients=?"),
        ({"simlarity": "cosine"}, "Did you mean similarity= for simlarity=?"),
        ({"weights": [1.0]}, "Did you mean client_weights= for weights=?"),
    ],
)
def test_a_misspelt_option_gets_a_hint(options: dict[str, object], hint: str) -> None:
    with pytest.raises(TypeError, match=re.escape(hint)):
        fastagg.make("fdms", num_clients=4, num_params=3, **options)


@pytest.mark.parametrize(
    ("given", "shown"), [((4, 3), "num_clients=4, num_params=3"), ((4,), "num_clients=4")]
)
def test_options_need_their_names(given: tuple[int, ...], shown: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"fastagg.make('fdms', {shown}, ...)")):
        fastagg.make("fdms", *given)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("params", "updates", "message"),
    [
        (torch.nn.Linear(2, 1), torch.ones(1, 3), "params: .* got Linear; fastagg.FlatLayout"),
        (dict(torch.nn.Linear(2, 1).state_dict()), torch.ones(1, 3), "params: .*from_state_dict"),
        (np.zeros(3, np.float32), torch.ones(1, 3), r"params: .*torch.from_numpy\(array\)"),
        ([np.zeros((2, 1)), np.zeros(1)], torch.ones(1, 3), r"params: .*numpy.concatenate"),
        (list(torch.nn.Linear(2, 1).parameters()), torch.ones(1, 3), r"params: .*torch.cat"),
        (torch.zeros(3), torch.nn.Linear(2, 1), "updates: .* got Linear; fastagg.FlatLayout"),
        (torch.zeros(3), torch.nn.Linear(2, 1).state_dict(), "updates: .*from_state_dict"),
        (torch.zeros(3), [torch.nn.Linear(2, 1)], r"updates\[0\]: .*FlatLayout.from_module"),
        (torch.zeros(3), [torch.nn.Linear(2, 1).state_dict()], r"updates\[0\]: .*from_state_dict"),
        (torch.zeros(3), [np.ones(3, np.float32)], r"updates\[0\]: .*torch.from_numpy\(array\)"),
        (torch.zeros(3), [np.ones((2, 1)), np.ones(1)], r"updates\[0\]: .*torch.from_numpy"),
        (torch.zeros(3), [[np.ones((2, 1)), np.ones(1)]], r"updates\[0\]: .*numpy.concatenate"),
        (torch.zeros(3), np.ones((1, 3), np.float32), r"updates: .*torch.from_numpy\(array\)"),
    ],
)
def test_other_types_get_a_hint(params: object, updates: object, message: str) -> None:
    agg = fastagg.make("fedavg", num_clients=4, num_params=3)
    with pytest.raises(TypeError, match=message):
        agg.step(params, updates, [0])  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ["8", "16", "32", "64"])
@pytest.mark.parametrize("sign", ["int", "uint"])
def test_ids_of_any_integer_type(sign: str, size: str) -> None:
    agg = fastagg.make("fedavg", num_clients=4, num_params=3)
    array = np.array([3, 1], sign + size)
    tensor = torch.tensor([3, 1], dtype=getattr(torch, sign + size))
    for clients in (array, tensor, array.astype(array.dtype.newbyteorder()), list(array)):
        report = agg.step(torch.zeros(3), torch.ones(2, 3), clients)
        assert report.active.tolist() == [1, 3] and report.active.dtype == torch.int64


def test_an_id_beyond_int64_is_refused() -> None:
    agg = fastagg.make("fedavg", num_clients=4, num_params=3)
    for clients in (
        np.array([2**64 - 1], np.uint64),
        torch.tensor([2**64 - 1], dtype=torch.uint64),
    ):
        with pytest.raises(IndexError, match="got 18446744073709551615"):
            agg.step(torch.zeros(3), torch.ones(1, 3), clients)


@pytest.mark.parametrize("clients", [np.array([0.0]), np.array([True]), torch.tensor([0.0])])
def test_ids_must_be_integers(clients: object) -> None:
    agg = fastagg.make("fedavg", num_clients=4, num_params=3)
    with pytest.raises(TypeError, match="clients: expected integers"):
        agg.step(torch.zeros(3), torch.ones(1, 3), clients)  # type: ignore[arg-type]


def test_repr_shows_the_options_that_are_not_defaults() -> None:
    agg = fastagg.make(
        "nnm", num_clients=9, num_params=2, num_byzantine=2, rule="krum", nonfinite="drop"
    )
    shown = repr(agg)
    assert shown.startswith("NNM(num_clients=9, num_params=2, server_lr=1.0, nonfinite='drop'")
    assert "num_byzantine=2" in shown and "rule='krum'" in shown and "max_norm" not in shown


def test_repr_knows_defaults_that_depend_on_other_options_and_on_the_rule() -> None:
    noise: dict[str, Any] = {"clip_norm": 1.0, "noise_multiplier": 1.0}
    noisy = fastagg.make("fedavg", num_clients=2, num_params=2, nonfinite="drop", **noise)
    assert noisy.max_norm is None and "max_norm" not in repr(noisy)
    buffered = fastagg.make("fedbuff", num_clients=2, num_params=2)
    assert repr(buffered) == "FedBuff(num_clients=2, num_params=2, server_lr=1.0)"
    for staleness in ("hinge", None):
        given = fastagg.make("fedbuff", num_clients=2, num_params=2, staleness=staleness)
        assert ", staleness=" in repr(given)
    for name in ("nnm", "bucketing"):
        plain = fastagg.make(name, num_clients=2, num_params=2, rule="krum")
        assert repr(plain).endswith("(num_clients=2, num_params=2, server_lr=1.0, rule='krum')")
        start = {"start": "zero"}
        given = fastagg.make(name, num_clients=2, num_params=2, rule_options=start)
        assert "'start': 'zero'" in repr(given)


@pytest.mark.parametrize(
    ("cuda", "visible", "reason"),
    [
        (None, False, "this torch was built without CUDA: install one with CUDA"),
        ("13.0", False, "torch finds no GPU on this machine"),
        ("13.0", True, "fastagg was built without CUDA kernels: build it again"),
    ],
)
def test_a_missing_gpu_is_explained(
    cuda: str | None, visible: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible)
    monkeypatch.setattr("fastagg.options.devices", lambda: ("cpu",))
    with pytest.raises(ValueError, match=f"device: expected 'cpu', got 'cuda'; {reason}"):
        fastagg.make("fedavg", num_clients=2, num_params=2, device="cuda")
