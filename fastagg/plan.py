# SPDX-License-Identifier: Apache-2.0
"""What a rule will need, before a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastagg.costs import Sizes
from fastagg.options import read_size
from fastagg.registry import find

_UNITS = ("", "k", "M", "G", "T", "P")


@dataclass(frozen=True)
class RoundPlan:
    """Memory of a rule, and the work of one of its rounds. ``print`` shows a table.

    Attributes:
        rule, num_clients, num_active, num_params, adopting: as given to :func:`plan`.
        state_bytes: kept between rounds and written to checkpoints: ``Aggregator.memory_bytes``.
            An upper bound where that depends on the run (``mimic`` and ``stale-models``, adopting).
        scratch_bytes: used during a step besides, results of size S x S included.
        bytes_moved: read and written by the server's passes over memory in one round.
        flops: additions and multiplications of one round.
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

    def __str__(self) -> str:
        form = "rows adopted" if self.adopting else "rows copied or only read"
        rows = [
            ("state", self.state_bytes, "B"),
            ("scratch", self.scratch_bytes, "B"),
            ("moved per round", self.bytes_moved, "B"),
            ("work per round", self.flops, "flop"),
        ]
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
    fdms          6K^2 + 8                       8Sd + 24d + 6K(K - S) + 52S^2         S(S + 3)d
      eliminating   + K ceil(K/8)                  + 6K^2 + (3K - S) ceil(K/8) + 6S^2
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
    For fdms every pair counts; elimination saves up to the factor by which it shrinks the
    candidate sets.

    Args:
        name: one of :func:`fastagg.available`.
        num_clients: K.
        num_active: S, in [1, K].
        num_params: d.
        adopting: updates will come in an :class:`fastagg.UpdateBuffer` (its 4Kd bytes are the
            caller's and not counted).
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
    cost = rule.cost(Sizes(K, S, d, adopting), options)
    work = (cost.state, cost.scratch, cost.moved, cost.flops)
    return RoundPlan(name, K, S, d, adopting, *work)


def _short(value: float) -> str:
    """Three digits and a decimal prefix: 12.3 M."""
    for prefix in _UNITS[:-1]:
        if value < 999.5:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} {_UNITS[-1]}"
