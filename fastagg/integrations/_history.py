# SPDX-License-Identifier: Apache-2.0
"""The metrics of all rounds of a run, which its checkpoints hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

KINDS = ("train", "evaluate", "server")
"""Of training and evaluation by clients, and of evaluation by the server."""

Metrics = Mapping[str, Any]
"""Numbers, or lists of numbers, by name."""


class MetricHistory:
    """The metrics of each round, by kind.

    Attributes:
        rounds: dict from the kinds to dicts from rounds to metrics.
    """

    def __init__(self) -> None:
        self.rounds: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in KINDS}

    def add(self, kind: str, number: int, metrics: Metrics | None) -> None:
        """Store the metrics of a round; None: there are none."""
        if metrics is not None:
            self.rounds[kind][number] = dict(metrics)

    def to_tensor(self) -> Tensor:
        """Return the history as JSON text in a tensor of bytes, uint8 [n]."""
        return torch.frombuffer(bytearray(json.dumps(self.rounds).encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, text: Tensor) -> MetricHistory:
        """Make the history of :meth:`to_tensor`.

        Raises:
            ValueError: the tensor is not from :meth:`to_tensor`.
        """
        history = cls()
        try:
            content = json.loads(bytes(text.tolist()))
            if text.dtype != torch.uint8 or set(content) != set(KINDS):
                raise ValueError("not the kinds of a history")
            for kind, rounds in content.items():
                for number, metrics in rounds.items():
                    if not all(map(_is_metric, metrics.values())):
                        raise ValueError(f"not metrics: {metrics!r}")
                    history.rounds[kind][int(number)] = dict(metrics)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"history: expected the metrics of rounds, got {error}") from error
        return history


def _is_metric(value: object) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, int | float) and not isinstance(item, bool) for item in items)
