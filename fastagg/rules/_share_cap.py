# SPDX-License-Identifier: Apache-2.0
"""Divide the shares of absent clients among active rows, none of which takes more than a cap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastagg.options import read_positive
from fastagg.updates.small import factors_tensor


class Proposal(NamedTuple):
    """An absent client's proposal to an active row to take a part of its share."""

    score: float
    client: int  # id of the absent client
    position: int  # of the row
    part: float  # of what is left of the client's share; the parts of one client have sum 1


_ROUNDING = 1e-12
"""Amounts up to this part of the cap are rounding errors: neither room of a row nor a share."""

Propose = Callable[[list[int], list[int]], list[Proposal]]
"""(absent clients, positions of the rows with room) -> proposals; clients without a friend make
none."""


def read_max_share(value: object, num_clients: int) -> float | None:
    """Return the option ``max_share``: None, or a number in [1/K, 1].

    Raises:
        TypeError, ValueError: ``value`` is not as described.
    """
    if value is None:
        return None
    share = read_positive("max_share", value)
    if share > 1.0 or share * num_clients < 1.0:
        raise ValueError(
            f"max_share: expected a number in [1/num_clients, 1] = [{1.0 / num_clients:.6g}, 1], "
            f"because the shares of all clients have sum 1, got {share:.6g}"
        )
    return share


def round_cap(max_share: float, size: int) -> float:
    """Return the cap of a round with ``size`` rows: at least 1/size, so that all shares fit."""
    return max(max_share, 1.0 / size)


def divide(
    own: Sequence[float], absent: dict[int, float], cap: float, propose: Propose
) -> tuple[Tensor, dict[int, int]]:
    """Divide the shares of absent clients among rows with room below the cap.

    A row has room ``max(0, cap - weight)``. In every pass, each client with a share left proposes
    it to its best rows that have room. A row takes proposals in descending order of their scores
    (ties: lowest id first) until it has no room; it takes a part of the last one. What was not
    taken is proposed in the next pass. The share of a client to which no row is left is split
    evenly over all rows, limited by their room. A pass that leaves something fills a row, so there
    are at most S passes.

    Args:
        own: S shares of the active clients, with which the weights begin; they may exceed the cap.
        absent: shares of the absent clients, by id.
        cap: c with S c >= the sum of all shares.
        propose: makes the proposals of a pass.

    Returns:
        The weights [S] float64; and for each absent client of which a row took something in a pass,
        the position of the first such row.
    """
    least = _ROUNDING * cap
    weights, room = list(own), [cap - share if cap - share > least else 0.0 for share in own]
    rest, orphaned, first = dict(absent), 0.0, dict[int, int]()
    while rest:
        proposals = propose(list(rest), [p for p, free in enumerate(room) if free > 0.0])
        refused: dict[int, float] = {}
        for _, client, position, part in sorted(proposals, key=_order):
            amount = rest[client] * part
            taken = min(amount, room[position])
            if room[position] > 0.0:
                first.setdefault(client, position)
            weights[position] += taken
            left = room[position] - taken
            room[position] = left if left > least else 0.0
            if amount - taken > least:
                refused[client] = refused.get(client, 0.0) + (amount - taken)
        heard = {proposal.client for proposal in proposals}
        orphaned += sum(share for client, share in rest.items() if client not in heard)
        rest = {client: refused[client] for client in rest if client in refused}
    return factors_tensor(weights) + even_parts(factors_tensor(room), orphaned), first


def _order(proposal: Proposal) -> tuple[float, int, int]:
    return -proposal.score, proposal.client, proposal.position


def even_parts(room: Tensor, amount: float | Tensor) -> Tensor:
    """Return ``min(level, room)`` [S] with the sum ``amount``, or all room if that is less.

    For every i, the sum of ``min(level, room)`` is at most the i smallest rooms plus
    ``(S - i) * level``, and equal for one i. So the level is the largest of
    ``(amount - i smallest rooms) / (S - i)``.

    Args:
        room: [S] float64, >= 0.
        amount: >= 0; a number or a tensor [].
    """
    ascending = room.sort().values
    smallest = ascending.cumsum(0) - ascending
    left = torch.arange(len(room), 0, -1, device=room.device, dtype=torch.float64)
    level = ((amount - smallest) / left).max()
    return torch.minimum(level.clamp(min=0.0), room)
