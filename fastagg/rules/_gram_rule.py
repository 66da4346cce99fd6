# SPDX-License-Identifier: Apache-2.0
"""Base of the rules whose factors are a function of the Gram matrix of the rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fastagg.aggregator import Aggregator, CommonOptions, State
from fastagg.costs import Cost, Sizes
from fastagg.memory.int8 import COLUMN_BLOCKS, SCALES, AnyMemory, check_int8
from fastagg.memory.rows import RowMemory
from fastagg.memory.stores import read_store, row_bytes
from fastagg.ops.memory import count_of, count_up_, picked
from fastagg.report import Plan, Reading
from fastagg.rules._ages import RowAges, age_bytes, check_ages, make_ages, read_max_age
from fastagg.rules._client_weights import read_client_weights, relative, shares_among
from fastagg.rules._reuse import ReusedRows
from fastagg.rules.common_row import find_common_row, with_common_row
from fastagg.rules.gram_policy import Policy
from fastagg.staleness import discounted, none_but_constant
from fastagg.updates.allocation import allocate_vector
from fastagg.updates.any_rows import AnyRows, alike, each_row, rows_at
from fastagg.updates.cohort import Cohort
from fastagg.updates.columns import AROUND_BLOCK, Columns
from fastagg.updates.small import diagonal, factors_tensor, on_cpu

if TYPE_CHECKING:
    from typing_extensions import Unpack


_FULL = none_but_constant(
    "with reuse=True, the remembered row of an absent client counts in full, however old it is, "
    "and so does a late one; max_age leaves old rows out"
)
_ROW_OPTIONS = (
    *("client_weights", "memory_dtype", "memory_folder", "max_age", "min_active"),
    *("staleness", "max_staleness", "clip_norm", "noise_multiplier"),
)
"""Options that say nothing of the policy, and may not fit a rule with one client."""

SQUARES = 8
"""Estimated number of S x S float64 matrices in a policy at a time; wrapped ones have more."""


class ReuseOptions(CommonOptions, total=False):
    """Options of a Gram rule that subclasses pass on; :class:`GramRule` describes them."""

    memory_dtype: str
    memory_folder: str | os.PathLike[str] | None
    max_age: int | None


def used_rows(rows: AnyRows, factors: Tensor) -> tuple[AnyRows, Tensor]:
    """Return the rows whose factors are not 0, and these factors."""
    found: list[float] = factors.tolist()
    if 0.0 not in found:
        return rows, factors
    used = [i for i, factor in enumerate(found) if factor != 0.0]
    return rows_at(rows, used), factors_tensor([found[i] for i in used])


@dataclass
class GramPlan(Plan):
    """The plan of a Gram rule; ``weights`` holds the shares of all n rows, of sum 1."""

    active: list[int] = field(kw_only=True)  # positions of the S active clients' rows
    expired: list[int] = field(kw_only=True)  # ids of clients whose memory rows count as zero


@dataclass(frozen=True)
class Compared:
    """The rows that a policy compares.

    Attributes:
        gram: [m, m] float64, their Gram matrix.
        rows: m rows, or their sketches; read again only if some rows are close.
        columns: apply ops to ``rows``.
        scales: [m] float64, by which ``rows`` are multiplied in ``gram``; None: ones.
    """

    gram: Tensor
    rows: AnyRows
    columns: Columns
    scales: Tensor | None = None


@dataclass
class Judged(Reading):
    """The factors of the active clients' rows as ``weights``; the aggregate is in scratch."""

    gram: Tensor  # [n + e, n + e] float64, of all rows or of their sketches


class GramRule(Aggregator[GramPlan, Judged]):
    """``params += server_lr * factors @ rows``, with factors from a policy on the Gram matrix.

    A step reads the rows twice: once for their Gram matrix and once for the aggregate, where rows
    with factor 0 are not read. Between the two, the policy computes on the CPU with n x n matrices.

    If rows are nearly equal, most of them to a few percent of their norms, a Gram matrix does not
    give their distances exactly. A step then reads the rows once more, for the Gram matrix of the
    rows minus one of them; ``fastagg.rules.common_row`` derives the error of distances. (Not so
    if the policy needs norms, as ``geometric-median`` with ``start="zero"`` does.)

    On a GPU the Gram matrix has the precision "highest" of :func:`fastagg.ops.gram`, because a
    short distance is the difference of large products.

    With ``clip_norm``, rows that are too long are not copied: the Gram matrix of rows times f_i has
    the entries ``f_i f_j G_ij``, and the factor of a row in the aggregate is multiplied by f_i. The
    rows minus one of them are multiplied in the pass, before the subtraction.

    The n rows are those of the active clients. With ``reuse`` they are the last rows of all K
    clients (Su et al., eq. 43, which sums over all clients); a client that was never active has a
    row of zeros. The rule remembers exactly the rows that clients send: to reuse momentum, clients
    send their momentum. The rule may take ownership of rows instead of copying them.

    A late row is a row like any other; ``staleness`` multiplies its client's weight. With
    ``reuse``, it becomes the remembered row, if that is older, and counts in full.

    Args:
        policy: computes the factors.
        reuse: use the last updates of absent clients as well.
        client_weights: [K] relative weights, for instance sample counts; None: equal. A client of
            weight 0 is left out, as if it were absent.
        memory_dtype, memory_folder: where and how rows are remembered, with ``reuse`` only; see
            :class:`fastagg.rules._memory_rule.MemoryRule`.
        max_age: number of rounds, >= 1, skipped ones included, after which the row of an absent
            client expires and is zero, as if the client had never been active; with ``reuse`` only.
            None: never.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.

    Attributes:
        previous: [d] float32, the previous aggregate, zeros at first; None if the policy does not
            use it.
        memory: [K, d] in ``memory_dtype``, the last row of every client; None without ``reuse``.
            ``memory[k]`` returns a copy of row k, ``memory.clone()`` a copy of all rows.
        rounds: [] int64, steps so far, skipped ones included. It is part of the state only if the
            policy uses the round number, or with ``ages``.
        ages: the ages of the memory rows; None without ``reuse``, or without ``max_age`` and
            ``staleness``.
    """

    sums_rows: ClassVar[bool] = True
    """Whether the aggregate is ``factors @ rows``."""
    column_state = frozenset({"previous", "memory", SCALES})
    column_blocks = COLUMN_BLOCKS
    norms_known = True
    computes_gram = True
    collects_streams = False
    no_weights = (
        "it must withstand clients that lie, and such numbers come from the clients; "
        "client_weights are for weights that the server knows"
    )
    refused = MappingProxyType(
        {
            "sketch": "sketches keep the distances of two rows, but this rule compares rows with "
            "averages of rows; sketches of all averages of S rows need k of the order of S^2"
        }
    )

    def __init__(
        self,
        policy: Policy,
        *,
        reuse: bool = False,
        client_weights: Any = None,
        memory_dtype: str = "float32",
        memory_folder: str | os.PathLike[str] | None = None,
        max_age: int | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        if not isinstance(reuse, bool):
            raise TypeError(f"reuse: expected True or False, got {reuse!r}")
        if reuse:
            self.refused_staleness = _FULL
        super().__init__(**options)
        self.policy = policy
        self.reuse = reuse
        self.memory_dtype = memory_dtype
        self.client_weights = read_client_weights(client_weights, self.num_clients)  # [K]
        first = float(self.client_weights[0])
        self._equal = first if bool((self.client_weights == first).all()) else None
        self._all_shares = relative(self.client_weights, "all clients")  # [K]
        self.rounds = torch.zeros((), dtype=torch.int64, device="cpu")
        self._aggregate = allocate_vector(self.num_params, self.device)  # [d], scratch
        self.previous: Tensor | None = None
        if policy.uses_previous:
            self.previous = allocate_vector(self.num_params, self.device)
        self._reused: ReusedRows | None = None
        self.remembers_clients = reuse
        self.gathers_rows = not (reuse or policy.uses_previous)  # both take rows one by one
        if reuse:
            store = read_store(memory_dtype, memory_folder)
            self._reused = ReusedRows(self.num_clients, self.num_params, self.device, store)
        elif memory_dtype != "float32" or memory_folder is not None or max_age is not None:
            raise ValueError(
                "memory_dtype, memory_folder, max_age: expected reuse=True with these options"
            )
        self.max_age = read_max_age(max_age)
        self.ages: RowAges | None = None
        if reuse:
            self.ages = make_ages(self.num_clients, self.max_age, self.staleness, self.rounds)

    @property
    def memory(self) -> AnyMemory | None:
        """[K, d] in ``memory_dtype``, the last row of every client; None without ``reuse``."""
        return None if self._reused is None else self._reused.memory

    def _too_late(self, cohort: Cohort, ages: Tensor) -> dict[int, str]:
        return {} if self.ages is None else self.ages.too_late(cohort, ages)

    def _receive(self, cohort: Cohort) -> Cohort:
        return cohort if self._reused is None else self._reused.receive(cohort, self.columns)

    def _scales_rows(self, cohort: Cohort) -> bool:
        return True  # with reuse, `_receive` multiplies the copies

    def _plan(self, cohort: Cohort) -> GramPlan:
        size, ids = len(cohort), cohort.ids
        if self._reused is not None:
            shares = self._all_shares
        elif cohort.ages is None:
            ids, shares = list(range(size)), shares_among(self.client_weights, cohort)
        else:
            ids, weights = list(range(size)), picked(self.client_weights, cohort.clients)
            weights = discounted(weights, cohort, self.staleness)
            shares = relative(weights, "the active clients")
        expired = [] if self.ages is None else self.ages.expired()
        return GramPlan(shares, pairs=size * (size - 1), active=ids, expired=expired)

    def _read(self, params: Tensor, cohort: Cohort, plan: GramPlan) -> Judged:
        rows = cohort.rows
        if self._reused is not None:
            rows = self._reused.rows(cohort, plan.expired)
        scales = cohort.scales
        if self.previous is not None:
            rows = alike(rows, [*each_row(rows), self.previous])
            scales = None if scales is None else torch.cat([scales, scales.new_ones(1)])
        compared = self._compared(rows, scales, cohort, plan)
        factors = self._factors(compared, plan.weights)
        self._sum(rows, factors, scales)
        v = self._vector(plan, params, self._aggregate)
        if self._reused is not None:
            factors = factors[plan.active]
        elif self.previous is not None:
            factors = factors[: len(cohort)]
        return Judged(factors, v, compared.gram)

    def _commit(self, cohort: Cohort, plan: GramPlan, reading: Judged) -> None:
        if self.previous is not None:
            self.previous, self._aggregate = self._aggregate, self.previous
        if self._reused is not None:
            self._reused.commit(cohort, reading.gram, plan.expired)
        if self.ages is not None:
            self.ages.renew(cohort.clients, plan.expired, cohort.ages)
        count_up_(self.rounds)

    def _sum(self, rows: AnyRows, factors: Tensor, scales: Tensor | None) -> None:
        """Write the aggregate into the scratch vector; rows with factor 0 are not read.

        Args:
            rows: n + e rows.
            factors: [n + e] float64, the factors of the rows times ``scales``.
            scales: [n + e] float64; None: ones.
        """
        rows, factors = used_rows(rows, factors if scales is None else factors * scales)
        self.columns.weighted_sum_(self._aggregate, rows, factors, beta=0.0)

    def _compared(
        self, rows: AnyRows, scales: Tensor | None, cohort: Cohort, plan: GramPlan
    ) -> Compared:
        """Check the norms of the active clients' rows; return what the policy compares.

        Args:
            rows: n + e rows.
            scales: [n + e] float64, by which rows are multiplied; None: ones.
            cohort, plan: as for ``_read``.
        """
        gram = self._gram(rows, cohort, plan.expired)
        if scales is not None:  # equal rows have equal factors, so their distance stays 0
            gram = gram * (scales[:, None] * scales)
        squares = diagonal(gram).tolist()
        self._check_squares(cohort, [squares[i] for i in plan.active])
        return Compared(gram, rows, self.columns, scales)

    def _gram(self, rows: AnyRows, cohort: Cohort, expired: list[int]) -> Tensor:
        if self._reused is None:
            return on_cpu(self.columns.gram(rows))
        return self._reused.gram(rows, cohort.ids, self.columns, expired)

    def _factors(self, compared: Compared, shares: Tensor) -> Tensor:
        """Return the factors of all n + e rows.

        Args:
            compared: the n + e rows.
            shares: [n] float64, shares of the clients; rows of share 0 are left out.
        """
        t = count_of(self.rounds) if self.policy.uses_round else 0
        if self._equal is not None or 0.0 not in shares.tolist():
            return self.policy(self._precise(compared, len(shares)), shares, t)
        gram, rows, scales = compared.gram, compared.rows, compared.scales
        taken = torch.ones(len(gram), dtype=torch.bool, device="cpu")
        taken[: len(shares)] = shares > 0
        used = shares[shares > 0]
        listed = each_row(rows)
        some = Compared(
            gram[taken][:, taken],
            alike(rows, [listed[i] for i in taken.nonzero().flatten().tolist()]),
            compared.columns,
            None if scales is None else scales[taken],
        )
        factors = torch.zeros(len(gram), dtype=torch.float64, device="cpu")
        factors[taken] = self.policy(self._precise(some, len(used)), used, t)
        return factors

    def _precise(self, compared: Compared, num_rows: int) -> Tensor:
        """Return a Gram matrix for the policy, of the rows minus a common one if that pays."""
        gram = compared.gram
        if self.policy.uses_norms:
            return gram
        common = find_common_row(gram, num_rows)
        if common is None:
            return gram
        around = compared.columns.gram_around(compared.rows, common, compared.scales)
        return with_common_row(gram, around.cpu())

    def _skip(self) -> None:
        count_up_(self.rounds)

    def _state(self) -> State:
        state: dict[str, Tensor | RowMemory] = {}
        if self.previous is not None:
            state["previous"] = self.previous
        if self._reused is not None:
            state |= self._reused.memory.state()
        if self.policy.uses_round or self.ages is not None:
            state["rounds"] = self.rounds
        if self.ages is not None:
            state["last"] = self.ages.last
        return state

    def _forget(self, ids: list[int]) -> None:
        if self._reused is not None:
            self._reused.forget(ids)
        if self.ages is not None:
            self.ages.forget(ids)

    def _keep_others(self, before: GramRule) -> None:
        self.rounds.copy_(before.rounds)  # it need not be state

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        if self._reused is not None:
            check_int8(state)
        if self.ages is not None:
            check_ages(state, "memory")

    def options(self) -> dict[str, Any]:
        options = super().options()
        if not self.reuse:  # without reuse, no memory
            del options["memory_dtype"], options["max_age"]
        return options

    def _state_loaded(self) -> None:
        if self._reused is not None:
            self._reused.recompute(self.columns)

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # The Gram matrix reads the rows. The aggregate reads them again and writes the scratch
        # vector. abs_max reads params and the scratch vector, which is then added to params. The
        # traffic of policies is S x S and not counted; their scratch is. Of the Gram matrix of the
        # rows minus a common one, which few rounds need, only the scratch is counted.
        S, d, reuse = sizes.S, sizes.d, bool(options.get("reuse", False))
        members = sizes.K if reuse else S
        own = {key: value for key, value in options.items() if key not in _ROW_OPTIONS}
        policy = cls(num_clients=1, num_params=1, **own).policy
        extra = int(policy.uses_previous)
        n, changed = members + extra, S + extra
        kept = n - changed  # only the squared norms of these are computed again
        products = changed * (changed + 1) // 2 + changed * kept + kept
        row = row_bytes(options, d)
        state = 4 * d * extra + (sizes.K * row if reuse else 0)
        copies = reuse and not sizes.owned  # into spare rows
        copied, spares = (8 * S * d, S * row) if copies else (0, 0)
        if options.get("max_age") is not None:
            spares += row  # a row of zeros
        rounds = 8 if policy.uses_round else 0
        if reuse:
            rounds += age_bytes(options, sizes.K, counts_rounds=policy.uses_round)
        return Cost(
            state=state + rounds,
            scratch=4 * d + 8 * SQUARES * n * n + 4 * n * min(d, AROUND_BLOCK) + spares,
            moved=8 * n * d + 24 * d + copied,
            flops=2 * products * d + 2 * n * d,
            reduced=4 * n * (n + 1),
        )
