# SPDX-License-Identifier: Apache-2.0
"""Rounds of the adapter for NVIDIA FLARE by direct calls, and the same rounds in a loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastagg

pytest.importorskip("nvflare", reason="nvflare is not installed (make test-flower installs it)")

from nvflare.apis.client import Client
from nvflare.apis.dxo import DXO, from_shareable
from nvflare.apis.fl_constant import ReservedKey, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.shareablegenerators.full_model_shareable_generator import (
    FullModelShareableGenerator,
)

from fastagg.integrations.nvflare import FastAggAggregator

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
