# SPDX-License-Identifier: Apache-2.0
"""What holds for the state of pairs of clients after any sequence of FDMS steps."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fastagg.checkpoint import invariants
from fastagg.ops import bits
from fastagg.options import FLOAT32_LIMIT

_BLOCK = 256  # rows of candidates that are unpacked at a time
_ROUNDING = 2.0**-20
"""Margin for the float32 roundings of mean scores."""
_RANGES = {"cosine": (-_ROUNDING, 1.0 + _ROUNDING), "distance": (-FLOAT32_LIMIT, 0.0)}


def check_pair_state(state: invariants.State, similarity: str) -> None:
    """Check scores, counts, rounds and, if they are there, candidates of :class:`fastagg.FDMS`.

    Raises:
        ValueError: no steps lead to this state.
    """
    scores, counts = cast(Tensor, state["scores"]), cast(Tensor, state["counts"])
    rounds = int(cast(Tensor, state["rounds"]))
    invariants.check_range("counts", counts, 0, rounds)  # settle() was called, if enqueued
    invariants.check_symmetric("counts", counts)
    invariants.check_symmetric("scores", scores)
    invariants.check_range("scores", scores, *_RANGES[similarity])
    invariants.check_blank("scores", scores, counts == 0, "counts are 0")
    own = torch.ones(len(counts), dtype=torch.bool, device="cpu")
    invariants.check_blank("counts", counts.diagonal(), own, "k = i")
    if "candidates" in state:
        _check_candidates(cast(Tensor, state["candidates"]), counts)


def _check_candidates(candidates: Tensor, counts: Tensor) -> None:
    """Check packed candidates [K, ceil(K / 8)] against counts [K, K].

    Raises:
        ValueError: a bit beyond K is set, a client is not its own candidate, or a candidate was
            removed that was never scored.
    """
    num_clients = len(counts)
    everyone = bits.ones(1, num_clients, candidates.device)
    invariants.require(
        not bool((candidates & ~everyone).any()), "candidates", f"no bits beyond {num_clients}"
    )
    for begin in range(0, num_clients, _BLOCK):
        block = slice(begin, begin + _BLOCK)
        removed = ~bits.unpack(candidates[block], num_clients)
        invariants.require(
            not bool((removed & (counts[block] == 0)).any()),
            "candidates",
            "every client itself and every client that was never scored",
        )
