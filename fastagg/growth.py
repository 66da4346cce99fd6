# SPDX-License-Identifier: Apache-2.0
"""Continue with more clients: the state of a rule with K clients, for one with more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastagg.aggregator import Aggregator
from fastagg.checkpoint import invariants
from fastagg.ops import bits


def widened_state(
    aggregator: Aggregator[Any, Any], state: Mapping[str, Tensor], num_clients: int
) -> dict[str, Tensor]:
    """Return the state of a rule with fewer clients as a state of ``aggregator``.

    Clients keep their ids. What is remembered of the others is as it is at first.

    Args:
        aggregator: a new aggregator with K clients.
        state: the ``state_dict`` of an aggregator with the same options but fewer clients.
        num_clients: their number, less than K.

    Returns:
        A state for ``aggregator.load_state_dict``, which checks it.

    Raises:
        ValueError: a tensor is missing, or has more elements than here.
    """
    own = aggregator.state_dict()
    invariants.check_names(own, state)
    wide = {}
    for name, value in own.items():
        packed = name == "candidates"
        if packed:
            value = bits.unpack(value, aggregator.num_clients)
        wide[name] = _widen(name, state[name], value, num_clients if packed else None)
        if packed:
            wide[name] = bits.pack(wide[name])
    return aggregator._widened(wide)


def _widen(name: str, before: Tensor, first: Tensor, num_flags: int | None) -> Tensor:
    """Return ``first`` with ``before`` in its first rows and columns."""
    if num_flags is not None and before.dim() == 2:
        before = bits.unpack(before, num_flags)
    fits = before.dim() == first.dim() and all(
        n <= m for n, m in zip(before.shape, first.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"state[{name!r}]: expected at most shape {list(first.shape)}, got {list(before.shape)}"
        )
    wide = first.clone()
    wide[tuple(slice(n) for n in before.shape)] = before
    return wide
