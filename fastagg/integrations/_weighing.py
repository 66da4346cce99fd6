# SPDX-License-Identifier: Apache-2.0
"""Whether answers count by the weights that clients report, such as numbers of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fastagg.aggregator import Aggregator
from fastagg.integrations._report import Answer
from fastagg.options import FLOAT32_LIMIT, as_float, shown

_NUMBERS = (int, float, np.integer, np.floating)


class Weighing:
    """The option ``weighted`` of a server.

    Args:
        weighted: True: answers count by their weights. False: they do not. None: they do if the
            rule takes weights of a round and has no ``client_weights``.
        rule: the rule.

    Attributes:
        used: whether answers count by their weights.
        reason: why they do not, for the log; empty if they do, or if that was the choice.

    Raises:
        TypeError, ValueError: ``weighted`` is none of these values, or the rule takes no weights.
    """

    def __init__(self, weighted: object, rule: Aggregator) -> None:
        if weighted is not None and not isinstance(weighted, bool):
            raise TypeError(f"weighted: expected True, False or None, got {weighted!r}")
        if weighted and rule.refuses_weights:
            raise ValueError(
                f"weighted: expected None or False, because {rule.name} takes no weights: "
                f"{rule.refuses_weights}"
            )
        self.reason = ""
        if weighted is None:
            self.reason = rule.refuses_weights
            if not self.reason and not _equal(client_weights(rule)):
                self.reason = "it has client_weights; weighted=True uses the numbers of clients"
        self.used = weighted is not False and not self.reason

    def problem(self, answer: Answer) -> str | None:
        """Return why the weight of an answer cannot be used, or None."""
        return _problem(answer.weight) if self.used else None

    def kept(self, answer: Answer) -> Answer:
        """Return an answer for an inbox: without a weight that is not used and is no weight."""
        if self.used or _problem(answer.weight) is None:
            return answer
        return replace(answer, weight=None)

    def read(self, answer: Answer) -> float:
        """Return the weight of an answer without a :meth:`problem`; 1.0 if weights are not used."""
        return as_float(answer.weight) if self.used else 1.0

    def of(self, clients: Sequence[int], weights: Mapping[int, float]) -> list[float] | None:
        """Return the weights for a step of ``clients``; None: the rule's own count."""
        return [weights[client] for client in clients] if self.used else None

    def merged(self, rule: Aggregator, weights: Mapping[int, float]) -> Tensor | None:
        """Return the weights [K] float64 with which statistics are averaged; None: equal ones."""
        own = client_weights(rule)
        if not self.used or not weights:
            return own
        merged = torch.zeros(rule.num_clients, dtype=torch.float64, device="cpu")
        for client, weight in weights.items():
            merged[client] = weight
        return merged


def _problem(weight: object) -> str | None:
    """Return why a value from a client is no weight, or None."""
    if isinstance(weight, bool) or not isinstance(weight, _NUMBERS):
        return f"weight: expected a number, got {shown(weight)}"
    number = as_float(weight)
    if not 0.0 <= number <= FLOAT32_LIMIT:
        return f"weight: expected a finite number >= 0, got {number}"
    return None


def client_weights(rule: Aggregator) -> Tensor | None:
    """Return the client weights of a rule, [K] float64; None if it has none."""
    weights = getattr(rule, "client_weights", None)
    return weights if isinstance(weights, Tensor) else None


def _equal(weights: Tensor | None) -> bool:
    return weights is None or bool((weights == weights[0]).all())
