# SPDX-License-Identifier: Apache-2.0
"""A small model, its answers, and rounds of fastagg.Server."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fastagg import Server

K = 4
State = dict[str, Tensor]


def model(dtype: torch.dtype = torch.float32) -> State:
    made = torch.Generator().manual_seed(3)
    return {
        "w": torch.randn(4, 5, generator=made).to(dtype),
        "n": torch.tensor(7),
        "b": torch.randn(4, generator=made).to(dtype),
    }


def flat(state: State) -> Tensor:
    return torch.cat([state["w"].flatten(), state["b"]])


def trained(state: State, round: int, client: int) -> State:
    made = torch.Generator().manual_seed(100 * round + client)
    return {
        name: value + torch.randn(value.shape, generator=made)
        if value.is_floating_point()
        else value
        for name, value in state.items()
    }


def server(rule: str = "fdms", **options: Any) -> Server:
    return Server(rule, model(), num_clients=K, **options)


def expire(loop: Server) -> Any:
    """End the open round as its deadline does; return the report."""
    assert loop._round is not None
    loop._round.deadline = time.monotonic()
    return loop.finish_round()


def run_round(loop: Server, clients: Iterable[int]) -> Any:
    task = loop.begin_round()
    state = loop.model()
    for client in clients:
        assert loop.submit(client, trained(state, task.round, client), task.key) is None
    return expire(loop)
