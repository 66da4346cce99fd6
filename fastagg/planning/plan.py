# SPDX-License-Identifier: Apache-2.0
"""What a rule will need, before a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastagg.aggregator import Aggregator
from fastagg.costs import Cost, Sizes
from fastagg.memory.stores import element_bytes
from fastagg.options import read_size
from fastagg.planning.rates import Rates, measure
from fastagg.registry import find
from fastagg.updates.columns import MIN_PIECE, segment_columns

_UNITS = ("", "k", "M", "G", "T", "P")
_MESSAGE = 512  # bytes in which a rank says that it can go on
_MESSAGES = 5  # a round: about the arguments, three results over all columns, and the report


@dataclass(frozen=True)
class RoundPlan:
    """Memory of a rule, and the work of one of its rounds. ``print`` shows a table.

    With several ranks, all figures are those of the rank with the most columns.

    Attributes:
        rule, num_clients, num_active, num_params, adopting, ranks, budget: as given to
            :func:`plan`.
        state_bytes: kept between rounds and written to checkpoints: ``Aggregator.memory_bytes``.
            An upper bound where that depends on the run (``mimic`` and ``stale-models``, adopting).
        scratch_bytes: used during a step besides, results of size S x S included.
        bytes_moved: read and written by the server's passes over memory in one round.
        flops: additions and multiplications of one round.
        update_bytes: of parameters and updates, in memory; of streamed updates, the budget.
        wire_bytes: that a rank sends and receives in one round.
        seconds: about what a round takes; None without a device.
    """

    rule: str
    num_clients: int
    num_active: int
    num_params: int
    adopting: bool
    state_bytes: int
    scratch_bytes: int
    bytes_moved: int
    flops: int
    ranks: int = 1
    budget: int | None = None
    update_bytes: int = 0
    wire_bytes: int = 0
    seconds: float | None = None

    def __str__(self) -> str:
        form = "rows adopted" if self.adopting else "rows copied or only read"
        if self.budget is not None:
            form = f"rows streamed, {_short(self.budget)}B at a time"
        if self.ranks > 1:
            form += f", {self.ranks} ranks, of which one has"
        rows: list[tuple[str, float, str]] = [
            ("state", self.state_bytes, "B"),
            ("scratch", self.scratch_bytes, "B"),
            ("moved per round", self.bytes_moved, "B"),
            ("work per round", self.flops, "flop"),
        ]
        if self.ranks > 1:
            rows.append(("wire per round", self.wire_bytes, "B"))
        if self.seconds is not None:
            memory = self.state_bytes + self.scratch_bytes + self.update_bytes
            rows.append(("memory in all", memory, "B"))
            rows.append(("time per round", self.seconds, "s"))
        lines = [
            f"{self.rule}: K = {self.num_clients:,}, S = {self.num_active:,}, "
            f"d = {self.num_params:,}, {form}"
        ]
        lines += [f"  {name:<16}{_short(value):>7}{unit}" for name, value, unit in rows]
        return "\n".join(lines)


def plan(
    name: str,
    *,
    num_clients: int,
    num_active: int,
    num_params: int,
    adopting: bool = False,
    device: str | torch.device | None = None,
    ranks: int = 1,
    budget: int | None = None,
    rates: Rates | None = None,
    **options: Any,
) -> RoundPlan:
    """Memory and work of a rule with K clients, S of them active, and d parameters.

    Formulas, in bytes; each pass over a vector or a row counts once, caches and the reads that
    some processors make before a write do not:

    ============  =============================  ====================================  ===========
    rule          state                          moved per round                       flops
    ============  =============================  ====================================  ===========
    fedavg        0                              4Sd + 24d                             2Sd
    amplified     0                              4Sd + 24d                             2Sd
    fdms          6K^2 + 8                       4Sd + 24d + 6K(K - S) + 52S^2         S(S + 3)d
      eliminating   + K ceil(K/8)                  + 4Sd + 6K^2 + (3K - S) ceil(K/8)
                                                   + 6S^2
    mifa          4Kd + 8d                       16Sd + 28d; adopting 8Sd + 36d        3Sd + 3d
    stale         4Kd + 8d + K                   as mifa                               3Sd + 3d
    stale-models  4Kd + 8d + K (*)               16Sd + 28d; adopting 8Sd + 52d        4Sd + 3d (**)
    mimic         4Kd (*)                        16Sd + 12d; adopting 8Sd + 36d        5Sd + 3d
      mode client   0                              8Sd + 20d                             2Sd + 2d
    scaffold      4Kd + 4d                       28Sd + 20d                            8Sd + d
    mimic-aged    4Kd + 8K + 8                   24Sd + 24d                            6Sd + 2d
    fedvarp       as mifa                        28Sd + 36d; adopting 20Sd + 44d       7Sd + 3d
    fedau         24K                            as fedavg                             2Sd
    fdms-soft     as fdms                        as fdms, + 6(K - S)S                  as fdms
    robust ones   0                              8Sd + 24d                             S(S + 3)d
    with reuse    4Kd                            8Kd + 8Sd + 24d; adopting no 8Sd      see below
    ============  =============================  ====================================  ===========

    With ``memory_dtype="bfloat16"`` a remembered row takes 2d instead of 4d, and S more of them are
    scratch, in which updates arrive. With ``memory_folder`` rows are copied, also if adopting.

    (*) Adopting, it also keeps one vector per round in which some client was last active: at most
    4(K - S + 1)d bytes, which are counted. A step reads such a vector for each of these rounds that
    its S clients go back to; one is counted. (**) And Sd more if adopting.

    Scratch is 4d for rules that only weigh rows, and 16S^2 more in fdms (18S^2 with elimination);
    none for rules with a memory, but adopting 8d (mifa, stale) or 12d (stale-models, mimic).

    The robust rules (geometric-median, centered-clip, krum, multi-krum, nnm, bucketing) have 64S^2
    of scratch besides, about. With ``reuse`` the inner products of S rows with K and the squares of
    the other K - S are computed: S(S + 1)d + 2(S + 1)(K - S)d, and 2Kd for the aggregate, with
    64K^2 of scratch. centered-clip has one more row, the previous aggregate, in all of this and in
    its state.

    Copying, rules with a memory read every row twice, the first time to see that it is finite.
    With ``max_norm``, rules without a Gram matrix read every row once more: 4Sd bytes, 2Sd flops.
    For fdms every pair counts; elimination saves up to the factor by which it shrinks the
    candidate sets.

    Args:
        name: one of :func:`fastagg.available`.
        num_clients: K.
        num_active: S, in [1, K].
        num_params: d.
        adopting: updates will come in an :class:`fastagg.UpdateBuffer` (its 4Kd bytes are the
            caller's and not counted).
        device: where the steps will run, to state memory and time too: its rates are measured
            now, which takes a third of a second. Time is that of moving the bytes plus that of the
            flops (and of the wire), as if nothing overlapped; disks of streams are not in it.
        ranks: columns are spread over so many (:mod:`fastagg.distributed`).
        budget: updates are streamed (:mod:`fastagg.streaming`), so many bytes at a time. Rules that
            remember rows then need S rows of memory more, in which they arrive.
        rates: to be used instead of measuring.
        **options: those of the rule, as in :func:`fastagg.make`.

    Raises:
        ValueError: there is no such rule, or a size is out of its range.
        TypeError: the rule has no such option, or a size is not an int.
    """
    rule = find(name, list(options))
    K, S = read_size("num_clients", num_clients), read_size("num_active", num_active)
    d = read_size("num_params", num_params)
    if S > K:
        raise ValueError(f"num_active: expected at most num_clients, {K}, got {S}")
    own = -(-d // read_size("ranks", ranks))
    keeps = adopting and options.get("memory_folder") is None  # a mapped memory copies rows
    sizes = Sizes(K, S, own, keeps)
    cost = rule.cost(sizes, options)
    messages = _MESSAGES
    if options.get("max_norm") is not None and not rule.norms_known:  # a pass of its own
        cost = replace(
            cost,
            moved=cost.moved + 4 * S * own,
            flops=cost.flops + 2 * S * own,
            reduced=cost.reduced + 8 * S,
        )
        messages += 1
    updates = 4 * own + (0 if adopting else 4 * S * own)
    if budget is not None:
        updates = 4 * own + read_size("budget", budget)
    if budget is not None or element_bytes(options) < 4:  # rows arrive in others, to be exchanged
        cost = replace(cost, scratch=cost.scratch + _staged(rule, sizes, options))
    wire = 0
    if ranks > 1:
        wire = 2 * cost.reduced + messages * _MESSAGE * ranks + 8 * (S + 2)
        cost = replace(cost, scratch=cost.scratch + cost.reduced * _parts(d, own, S, budget))
    if rates is None and device is not None:
        rates = measure(device)
    return RoundPlan(
        name,
        K,
        S,
        d,
        adopting,
        cost.state,
        cost.scratch,
        cost.moved,
        cost.flops,
        ranks,
        budget,
        updates,
        wire,
        None if rates is None else _seconds(cost, wire, ranks, rates),
    )


def _staged(rule: type[Aggregator], sizes: Sizes, options: Mapping[str, Any]) -> int:
    """Bytes of the rows into which a rule that remembers rows reads those of a stream, and converts
    those for a bfloat16 memory: a rule is one if a client more costs it d numbers more."""
    more = rule.cost(replace(sizes, K=sizes.K + 1), options).state
    size = element_bytes(options)
    remembers = more - rule.cost(sizes, options).state >= size * sizes.d
    return size * sizes.S * sizes.d if remembers else 0


def _parts(num_params: int, own: int, size: int, budget: int | None) -> int:
    """Of so many parts a rank keeps the Gram matrix until the ranks before it have added theirs."""
    piece = segment_columns(num_params)
    while budget is not None and piece > MIN_PIECE and 4 * size * piece > budget:
        piece //= 2
    return -(-own // piece)


def _seconds(cost: Cost, wire: int, ranks: int, rates: Rates) -> float:
    """As if nothing overlapped. What is reduced goes from rank to rank, one after the other."""
    hops = (ranks - 1) * cost.reduced + wire
    work = cost.moved / rates.bytes_per_s + cost.flops / rates.flops_per_s
    return work + (hops / rates.wire_bytes_per_s if ranks > 1 else 0.0)


def _short(value: float) -> str:
    """Three digits and a decimal prefix: 12.3 M."""
    if 0 < value < 0.9995:
        return f"{1e3 * value:.3g} m"
    for prefix in _UNITS[:-1]:
        if value < 999.5:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} {_UNITS[-1]}"
