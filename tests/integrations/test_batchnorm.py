# SPDX-License-Identifier: Apache-2.0
"""A model with batch normalisation under every rule, while most clients are absent."""

from __future__ import annotations

import functools
import io
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fastagg
from fastagg.integrations._report import Answer
from fastagg.integrations._server import AggregationServer

K, ROUNDS = 12, 50
# SCAFFOLD is refused: its clients need the control variate of the server.
RULES = [name for name in fastagg.available() if name not in ("scaffold", "mifa-client")]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.4), nn.ReLU(), nn.Linear(4, 2)
    )


def pack(state: dict[str, Tensor]) -> dict[str, bytes]:
    arrays = {}
    for name, tensor in state.items():
        stream = io.BytesIO()
        np.save(stream, tensor.detach().numpy())
        arrays[name] = stream.getvalue()
    return arrays


def unpack(arrays: dict[str, bytes]) -> dict[str, Tensor]:
    return {k: torch.as_tensor(np.load(io.BytesIO(data))) for k, data in arrays.items()}


@functools.cache
def batch(client: int, number: int) -> tuple[Tensor, Tensor]:
    """Return samples of a client; their variance is below 1, with which running_var begins."""
    generator = torch.Generator().manual_seed(1000 * client + number)
    x = torch.randn(8, 3, generator=generator) * (0.2 + 0.03 * client)
    return x, (x.sum(dim=1) > 0).long()


def loss_of(model: nn.Module, client: int, number: int) -> Tensor:
    x, y = batch(client, number)
    return functional.cross_entropy(model(x), y)


def run(rule: str, **options: Any) -> tuple[AggregationServer, Counter[str]]:
    """Train with 70 % dropout; check the model after every round."""
    model, start = net(), net()
    server = AggregationServer(rule, num_clients=K, max_empty_rounds=ROUNDS, **options)
    server.set_model(pack(model.state_dict()))
    parameters = list(model.parameters())
    rng = np.random.default_rng(5)
    seen: Counter[str] = Counter()
    for number in range(1, ROUNDS + 1):
        active = np.flatnonzero(rng.random(K) >= 0.7).tolist()
        sent = unpack(server.arrays())
        answers = []
        for client in active:
            model.load_state_dict(sent)
            model.train()
            gradients = torch.autograd.grad(loss_of(model, client, number), parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-0.1)
            answers.append(Answer(f"n{client}", pack(model.state_dict()), client))
        server.open_round(f"n{client}" for client in range(K))
        report = server.close_round(answers)
        seen["rejected"] += len(report.rejected)
        seen["moved"] += report.moved
        state = unpack(server.arrays())
        seen["broken"] += not all(bool(torch.isfinite(value).all()) for value in state.values())
        seen["negative"] += bool((state["1.running_var"] < 0.0).any())
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        seen["infinite loss"] += not bool(loss_of(model, 0, 0).isfinite())
    assert not torch.equal(state["1.running_var"], start.state_dict()["1.running_var"])
    return server, seen


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_statistics_stay_finite_and_variances_positive(rule: str) -> None:
    _, seen = run(rule)
    assert seen["broken"] == seen["negative"] == seen["infinite loss"] == 0
    assert seen["rejected"] == 0
    assert seen["moved"] > ROUNDS // 3  # some robust rules refuse rounds of few clients


@pytest.mark.parametrize("rule", ["mifa", "stale"])
def test_a_rule_with_a_memory_makes_variances_negative(rule: str) -> None:
    """Say why there are roles: as weights, differences of old rounds are added up."""
    _, seen = run(rule, roles={"*": "rule"})
    assert seen["negative"] > 0
