# SPDX-License-Identifier: Apache-2.0
"""Base of the rules that weigh rows by what their Gram matrix says about them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastagg import ops
from fastagg.aggregator import Aggregator, CommonOptions, Plan, Reading, State
from fastagg.costs import Cost, Sizes
from fastagg.memory.rows import RowMemory
from fastagg.memory.stores import element_bytes, read_store
from fastagg.rules._client_weights import read_client_weights, relative
from fastagg.rules._reuse import ReusedRows
from fastagg.rules.gram_policy import Policy
from fastagg.updates.cohort import Cohort
from fastagg.updates.columns import AnyRows, alike

if TYPE_CHECKING:
    from typing_extensions import Unpack


_ROW_OPTIONS = ("client_weights", "memory_dtype", "memory_folder")

_SQUARES = 8
"""How many S x S float64 matrices a policy has at a time, about; wrapped ones have more."""


class ReuseOptions(CommonOptions, total=False):
    """The options that every rule on the Gram matrix has; :class:`GramRule` describes them."""

    memory_dtype: str
    memory_folder: str | os.PathLike[str] | None


@dataclass
class GramPlan(Plan):
    """The shares of the rows that take part, [n] float64 of sum 1, as ``weights``."""

    active: list[int] = field(kw_only=True)  # positions of the S active clients' rows among them


@dataclass
class Judged(Reading):
    """What the policy decided; the aggregate is in scratch."""

    gram: Tensor  # [n + e, n + e] float64, of all rows that take part


class GramRule(Aggregator[GramPlan, Judged]):
    """``params += server_lr * factors @ rows``, with factors from a policy on the Gram matrix.

    A step reads the rows twice: once for their Gram matrix, once for the aggregate, of which rows
    with factor 0 are left out. Everything between works on S x S numbers
    on the CPU.

    With ``reuse``, absent clients take part with their last row (Su et al., eq. 43, which sums
    over all clients), clients never seen with a row of zeros. Rows are kept as they were given: to
    reuse momentum, clients send their momentum. Rows that are handed over are kept as they are.

    Args:
        policy: the rule itself.
        reuse: remember the last row of every client and use it again.
        client_weights: [K] relative weights, for instance sample counts; None: equal. A client of
            weight 0 has no say, as if it were absent.
        memory_dtype, memory_folder: see :class:`fastagg.rules._memory.MemoryRule`; with ``reuse``.
        **options: those of :class:`fastagg.Aggregator`.

    Attributes:
        previous: [d] float32, the previous aggregate, zeros at first; None if the rule does not
            start from it.
        memory: [K, d] float32, the last row of every client (``memory[k]`` is a copy of one,
            ``memory.clone()`` a tensor); None without ``reuse``.
        rounds: [] int64, steps so far, skipped ones included; only kept by rules that draw lots.
    """

    column_state = frozenset({"previous", "memory"})
    norms_known = True
    collects_streams = False

    def __init__(
        self,
        policy: Policy,
        *,
        reuse: bool = False,
        client_weights: Any = None,
        memory_dtype: str = "float32",
        memory_folder: str | os.PathLike[str] | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(**options)
        if not isinstance(reuse, bool):
            raise TypeError(f"reuse: expected True or False, got {reuse!r}")
        self.policy = policy
        self.reuse = reuse
        self.memory_dtype = memory_dtype
        self.client_weights = read_client_weights(client_weights, self.num_clients)  # [K]
        self._all_shares = relative(self.client_weights, "all clients")  # [K]
        self.rounds = torch.zeros((), dtype=torch.int64)
        self._aggregate = torch.zeros(self.num_params, device=self.device)  # [d], scratch
        self.previous: Tensor | None = None
        if policy.uses_previous:
            self.previous = torch.zeros(self.num_params, device=self.device)
        self._reused: ReusedRows | None = None
        if reuse:
            store = read_store(memory_dtype, memory_folder)
            self._reused = ReusedRows(self.num_clients, self.num_params, self.device, store)
        elif memory_dtype != "float32" or memory_folder is not None:
            raise ValueError("memory_dtype, memory_folder: expected reuse=True, there is no memory")

    @property
    def memory(self) -> RowMemory | None:
        return None if self._reused is None else self._reused.memory

    def _receive(self, cohort: Cohort) -> Cohort:
        return cohort if self._reused is None else self._reused.receive(cohort, self.columns)

    def _plan(self, cohort: Cohort) -> GramPlan:
        size, ids = len(cohort), cohort.ids
        if self._reused is None:
            ids, weights = list(range(size)), self.client_weights[cohort.clients]
            shares = relative(weights, "the active clients")
        else:
            shares = self._all_shares
        return GramPlan(shares, pairs=size * (size - 1), active=ids)

    def _read(self, params: Tensor, cohort: Cohort, plan: GramPlan) -> Judged:
        rows = cohort.rows if self._reused is None else self._reused.rows(cohort)
        if self.previous is not None:
            rows = alike(rows, [*rows, self.previous])
        gram = self._gram(rows, cohort)
        squares = gram.diagonal().tolist()
        self._check_squares(cohort, [squares[i] for i in plan.active])
        factors = self._factors(gram, plan.weights)
        found: list[float] = factors.tolist()
        self._sum(rows, factors, found)
        self._check_range(*self._peaks_with(params, [self._aggregate]))
        own = torch.tensor([found[i] for i in plan.active], dtype=torch.float64)
        return Judged(own, gram)

    def _commit(self, params: Tensor, cohort: Cohort, plan: GramPlan, reading: Judged) -> None:
        ops.weighted_sum_(params, [self._aggregate], self._rate)
        if self.previous is not None:
            self.previous, self._aggregate = self._aggregate, self.previous
        if self._reused is not None:
            self._reused.commit(cohort, reading.gram)
        self.rounds += 1

    def _sum(self, rows: AnyRows, factors: Tensor, found: list[float]) -> None:
        """Compute the aggregate in the scratch vector; rows with factor 0 are not read."""
        if 0.0 in found:
            positions = [i for i, factor in enumerate(found) if factor != 0.0]
            listed = list(rows)
            rows, factors = alike(rows, [listed[i] for i in positions]), factors[positions]
        self.columns.weighted_sum_(self._aggregate, rows, factors, beta=0.0)

    def _gram(self, rows: AnyRows, cohort: Cohort) -> Tensor:
        if self._reused is None:
            return self.columns.gram(rows).cpu()
        return self._reused.gram(rows, cohort.ids, self.columns)

    def _factors(self, gram: Tensor, shares: Tensor) -> Tensor:
        """One factor per row of ``gram`` [n + e, n + e], for clients' shares [n] of sum 1."""
        t = int(self.rounds)
        if 0.0 not in shares.tolist():
            return self.policy(gram, shares, t)
        taken = torch.ones(len(gram), dtype=torch.bool)
        taken[: len(shares)] = shares > 0
        factors = torch.zeros(len(gram), dtype=torch.float64)
        factors[taken] = self.policy(gram[taken][:, taken], shares[shares > 0], t)
        return factors

    def _skip(self) -> None:
        self.rounds += 1

    def _state(self) -> State:
        state: dict[str, Tensor | RowMemory] = {}
        if self.previous is not None:
            state["previous"] = self.previous
        if self._reused is not None:
            state["memory"] = self._reused.memory
        if self.policy.uses_round:
            state["rounds"] = self.rounds
        return state

    def options(self) -> dict[str, Any]:
        options = super().options()
        if not self.reuse:  # without a memory there is nothing to say about it
            del options["memory_dtype"]
        return options

    def _state_loaded(self) -> None:
        if self._reused is not None:
            self._reused.recompute(self.columns)

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # The Gram matrix reads the rows, the aggregate reads them again and writes the scratch
        # vector; abs_max of params and of that; it goes to params. What policies read and write is
        # S x S and not counted; they have a few such matrices at a time.
        S, d, reuse = sizes.S, sizes.d, bool(options.get("reuse", False))
        members = sizes.K if reuse else S
        own = {key: value for key, value in options.items() if key not in _ROW_OPTIONS}
        policy = cls(num_clients=1, num_params=1, **own).policy
        extra = int(policy.uses_previous)
        n, changed = members + extra, S + extra
        kept = n - changed  # of their inner products only squares are computed again
        products = changed * (changed + 1) // 2 + changed * kept + kept
        size = element_bytes(options)
        state = 4 * d * extra + (size * sizes.K * d if reuse else 0)
        copies = reuse and not sizes.adopting  # into spare rows
        copied, spares = (8 * S * d, size * S * d) if copies else (0, 0)
        return Cost(
            state=state + (8 if policy.uses_round else 0),
            scratch=4 * d + 8 * _SQUARES * n * n + spares,
            moved=8 * n * d + 24 * d + copied,
            flops=2 * products * d + 2 * n * d,
            reduced=4 * n * (n + 1),
        )
