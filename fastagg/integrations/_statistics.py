# SPDX-License-Identifier: Apache-2.0
"""The running statistics of a server's model: means of what the active clients sent.

A client sends values, not differences, and the server's values become their mean over the active
clients of the round. So a mean of variances is never negative, whatever the rule remembers. One
client could still move the mean as far as it likes. Therefore the distance of its statistics from
the server's is limited as the norm of its update is: by a multiple of the running median.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fastagg.checkpoint import invariants
from fastagg.integrations._wire import Arrays, Received, WireError, WireLayout
from fastagg.norm_bound import AdaptiveNorm, MaxNorm, RecentNorms, check_norms
from fastagg.options import LARGEST_ROW, MOST
from fastagg.updates.row_pool import RowPool
from fastagg.updates.statistics import mean_


class Statistics:
    """The statistics of a model and those that senders sent in this round.

    In each round, call :meth:`begin`, :meth:`read` for each answer, :meth:`far` when it is known
    which client each sender is, perhaps several times, and, if the rule's step was taken,
    :meth:`average`. Without :meth:`average` the round has no effect.

    Args:
        layout: the arrays; it may have no statistics.

    Attributes:
        values: [m] float32, the server's statistics.
    """

    def __init__(self, layout: WireLayout) -> None:
        self._layout = layout
        self.values = torch.zeros(layout.num_statistics, dtype=torch.float32, device="cpu")
        self._next = torch.zeros_like(self.values)
        self._pool = RowPool(MOST, max(1, layout.num_statistics))
        self._rows: dict[str, Tensor] = {}  # of this round, by sender
        self._senders: dict[int, str] = {}  # by client
        self._norms: RecentNorms | None = None

    def flatten(self, arrays: Arrays) -> Tensor:
        """Return the statistics of a model, [m] float32.

        Raises:
            WireError: an array does not match, or its values are not valid.
        """
        vector = torch.zeros_like(self.values)
        self._layout.copy_statistics(arrays, vector)
        return vector

    def begin(self, max_norm: MaxNorm) -> None:
        """Begin a round, in which the rule has this limit of norms.

        The limit of distances is always adaptive, because ``max_norm`` is in units of the updates;
        with None there is none. Options of an adaptive ``max_norm`` hold for distances, too.
        """
        self._pool.release()
        self._rows, self._senders = {}, {}
        self._follow(max_norm)

    def read(self, sender: str, arrays: Received) -> None:
        """Copy the statistics that a sender sent.

        Raises:
            WireError: an array does not match, or its values are not valid.
        """
        if len(self.values):
            self._layout.copy_statistics(arrays, self._row(sender))

    def take(self, sender: str, row: Tensor) -> None:
        """Copy the statistics of an answer that has waited, [m] float32, as :meth:`read` does.

        Raises:
            WireError: its values are not valid.
        """
        if len(self.values) == 0:
            return
        negative = [n for n, part in self._layout.variances(row).items() if bool((part < 0).any())]
        if negative or not bool((row.abs() <= LARGEST_ROW).all()):
            raise WireError("statistics: expected finite ones, and variances >= 0")
        self._row(sender).copy_(row)

    def _row(self, sender: str) -> Tensor:
        if sender not in self._rows:
            self._rows[sender] = self._pool.row(len(self._rows))
        return self._rows[sender]

    def far(self, clients: Mapping[str, int]) -> dict[str, str]:
        """Return the senders whose statistics are too far from the server's, each with the reason.

        Args:
            clients: dict from those that may count in this round, whose statistics were read, to
                clients.
        """
        self._senders = {client: sender for sender, client in clients.items()}
        if self._norms is None or len(self.values) == 0:
            return {}
        own = self.values.double()
        distances = {
            client: float(torch.linalg.vector_norm(self._rows[sender].double() - own))
            for client, sender in sorted(self._senders.items())
        }
        self._norms.begin()
        bound = self._norms.bound(distances)
        return {
            self._senders[
                client
            ]: f"statistics of client {client}: {distance:.6g} from the server's, but the "
            f"adaptive limit is {bound:.6g}"
            for client, distance in distances.items()
            if distance > bound
        }

    def average(
        self, active: Sequence[int], weights: Tensor | None, rejected: Collection[int] = ()
    ) -> None:
        """Make the mean of the active clients' statistics the server's.

        Args:
            active: ids that :meth:`far` got, ascending; with none, nothing changes.
            weights: [K] float64, >= 0; None: equal ones. If those of all active clients are zero,
                the server's statistics do not change.
            rejected: clients that the rule's step has rejected.
        """
        if len(self.values) == 0 or not active:
            return
        if self._norms is not None:
            self._norms.add(without=rejected)
        rows = [self._rows[self._senders[client]] for client in active]
        if mean_(self._next, rows, active, weights):
            self.values, self._next = self._next, self.values

    def state(self, max_norm: MaxNorm) -> dict[str, Tensor]:
        """Return what a checkpoint stores, not copied; nothing if there are no statistics."""
        if len(self.values) == 0:
            return {}
        self._follow(max_norm)
        norms = {} if self._norms is None else self._norms.state()
        return {"values": self.values, **norms}

    def load(self, state: Mapping[str, Tensor], saved: MaxNorm, wanted: MaxNorm) -> None:
        """Take what :meth:`state` returned. Known distances are kept if the limit is the same.

        Args:
            state: the tensors.
            saved: the rule's ``max_norm`` when they were saved.
            wanted: the present one.

        Raises:
            TypeError, ValueError: no rounds lead to this state. It is not taken.
        """
        if len(self.values) == 0:
            return
        before = _options(saved)
        norms = None if before is None else RecentNorms(before)
        own = {"values": self.values, **({} if norms is None else norms.state())}
        if state.keys() != own.keys():
            raise ValueError(f"statistics: expected {sorted(own)}, got {sorted(state)}")
        checked = {name: invariants.check_form(name, state[name], own[name]) for name in own}
        for name, tensor in checked.items():
            invariants.check_finite(name, tensor)
        for name, part in self._layout.variances(checked["values"]).items():
            invariants.check_range(name, part, 0.0, math.inf)
        if norms is not None:
            check_norms(checked)
            norms.norms.copy_(checked["norms"])
            norms.count.copy_(checked["norm_count"])
        self.values.copy_(checked["values"])
        self._norms = norms if before == _options(wanted) else None

    def _follow(self, max_norm: MaxNorm) -> None:
        """Limit distances as the rule's ``max_norm`` says; keep what is known if it is the same."""
        options = _options(max_norm)
        if options is None:
            self._norms = None
        elif self._norms is None or self._norms.options != options:
            self._norms = RecentNorms(options)


def _options(max_norm: MaxNorm) -> AdaptiveNorm | None:
    return AdaptiveNorm() if isinstance(max_norm, float) else max_norm
