# SPDX-License-Identifier: Apache-2.0
"""Read the option ``client_weights``, and divide weights of clients by their sum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastagg.ops.memory import picked, shares_of
from fastagg.updates.cohort import Cohort
from fastagg.updates.weights import read_weights


def read_client_weights(value: object, num_clients: int) -> Tensor:
    """Return client weights as a new float64 tensor [K] on the CPU.

    Args:
        value: K finite numbers >= 0, at least one of them > 0; None: 1/K each.
        num_clients: K.

    Raises:
        TypeError, ValueError: ``value`` is not as described.
    """
    if value is None:
        return torch.full((num_clients,), 1.0 / num_clients, dtype=torch.float64, device="cpu")
    return read_weights("client_weights", value, num_clients)


def relative(weights: Tensor, clients: str, name: str = "client_weights") -> Tensor:
    """Return ``weights`` divided by their correctly rounded sum: [n] float64 -> [n] float64.

    Args:
        weights: [n] float64, >= 0.
        clients: whose weights these are, for the error message.
        name: of the argument with the weights, for the error message.

    Raises:
        ValueError: all weights are zero.
    """
    whole = math.fsum(weights.tolist())
    if whole == 0.0:
        raise ValueError(f"{name}: expected a weight > 0 among {clients}, got all zeros")
    return weights / whole


def shares_among(client_weights: Tensor, cohort: Cohort) -> Tensor:
    """Return the client weights of the active clients, divided by their sum: [S] float64.

    Args:
        client_weights: [K] float64.
        cohort: S >= 1 clients.

    Raises:
        ValueError: all of these weights are zero.
    """
    shares = shares_of(client_weights, cohort.clients)
    if shares is not None:
        return shares
    return relative(picked(client_weights, cohort.clients), "the active clients")


def active_shares(client_weights: Tensor, cohort: Cohort) -> Tensor:
    """Return the shares of the active clients, of sum 1: [S] float64.

    They are those of the weights of the round, if it has weights. Equal ones give the bits of
    ``client_weights=None``.

    Args:
        client_weights: [K] float64.
        cohort: S >= 1 clients.

    Raises:
        ValueError: all of these weights are zero.
    """
    weights = cohort.weights
    if weights is None:
        return shares_among(client_weights, cohort)
    if bool((weights == weights[0]).all()) and weights[0] > 0:
        weights = torch.full_like(weights, 1.0 / len(client_weights))
    return relative(weights, "the active clients", "weights")


def all_shares(client_weights: Tensor, shares: Tensor, cohort: Cohort) -> Tensor:
    """Return the shares of all clients in a round, of sum 1: [K] float64.

    Args:
        client_weights: [K] float64; weights of the round replace those of the active clients.
        shares: [K] float64, ``client_weights`` divided by their sum.
        cohort: the active clients.

    Raises:
        ValueError: all weights are zero.
    """
    if cohort.weights is None:
        return shares
    weights = client_weights.index_copy(0, cohort.clients, cohort.weights)
    return relative(weights, "all clients", "weights and client_weights")


def absent_without_weights(client_weights: Tensor) -> str:
    """Return why a rule that weighs absent clients takes no weights of a round; empty: it does.

    Args:
        client_weights: [K] float64. The default, 1/K each, is in no units.
    """
    if bool((client_weights != 1.0 / len(client_weights)).any()):
        return ""
    return (
        "it weighs absent clients as well, so it needs client_weights [K] in the same units, such "
        "as sample counts"
    )
