# SPDX-License-Identifier: Apache-2.0
"""Estimates of a rule's memory, memory traffic and time before a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastagg import ops
from fastagg.aggregator import Aggregator
from fastagg.clipping import clip_bytes
from fastagg.costs import Cost, Sizes
from fastagg.norm_bound import norm_bytes, resolve_max_norm
from fastagg.options import option_defaults, read_device_name, read_size
from fastagg.planning.rates import Rates, measure
from fastagg.registry import find
from fastagg.rules.option_checks import check_options
from fastagg.server_optimizer import optimizer_cost
from fastagg.updates.any_rows import piece_columns
from fastagg.updates.columns import segment_columns

_UNITS = ("", "k", "M", "G", "T", "P")
_BUCKETS = 1024  # of the sketches that a plan compares with exact similarities
_WORTHWHILE = 0.8  # of the time without them
_MESSAGE = 512  # bytes of a message in which a rank reports success or an error
_MESSAGES = 5  # per round: for the arguments, three results over all columns, and the report


@dataclass(frozen=True)
class RoundPlan:
    """Memory of a rule and work of one round. ``print`` shows a table.

    With several ranks, all numbers are those of the rank with the most columns.

    Attributes:
        rule, num_clients, num_active, num_params, owned, ranks, budget: as given to
            :func:`plan`.
        state_bytes: bytes kept between rounds: ``Aggregator.memory_bytes``. For ``mimic``,
            ``mimic-aged`` and ``stale-models`` they include reference vectors, which checkpoints do
            not hold; their number depends on the run, and this is an upper bound.
        scratch_bytes: further bytes used during a step, including results of size S x S.
        bytes_moved: bytes read and written by the server's passes over memory in one round.
        flops: additions and multiplications of one round.
        update_bytes: bytes of the parameters and of the updates in memory. Streamed updates count
            as their budget.
        wire_bytes: bytes that a rank sends and receives in one round.
        kernel_bytes: bytes of temporary memory that the Gram kernel takes during a step on the CPU,
            with the present number of threads; 0 on a GPU. Between steps, the process keeps at most
            128 MB of kernel scratch.
        seconds: estimated time of a round; None if neither ``device`` nor ``rates`` was given.
        sketched_seconds: the same with ``sketch=1024``, if the rule has this option, it was not
            given, and it saves at least a fifth of the time even if products are computed while
            rows are read; otherwise None.
    """

    rule: str
    num_clients: int
    num_active: int
    num_params: int
    owned: bool
    state_bytes: int
    scratch_bytes: int
    bytes_moved: int
    flops: int
    ranks: int = 1
    budget: int | None = None
    update_bytes: int = 0
    wire_bytes: int = 0
    seconds: float | None = None
    kernel_bytes: int = 0
    sketched_seconds: float | None = None

    def __str__(self) -> str:
        form = "rows exchanged" if self.owned else "rows copied or only read"
        if self.budget is not None:
            form = f"rows streamed, {_short(self.budget)}B at a time"
        if self.ranks > 1:
            form += f", one of {self.ranks} ranks"
        rows: list[tuple[str, float, str]] = [
            ("state", self.state_bytes, "B"),
            ("scratch", self.scratch_bytes, "B"),
            ("moved per round", self.bytes_moved, "B"),
            ("work per round", self.flops, "flop"),
        ]
        if self.kernel_bytes:
            rows.insert(2, ("kernels", self.kernel_bytes, "B"))
        if self.ranks > 1:
            rows.append(("wire per round", self.wire_bytes, "B"))
        if self.seconds is not None:
            memory = self.state_bytes + self.scratch_bytes + self.kernel_bytes + self.update_bytes
            rows.append(("total memory", memory, "B"))
            rows.append(("time per round", self.seconds, "s"))
        if self.sketched_seconds is not None:
            rows.append((f"  sketch={_BUCKETS}", self.sketched_seconds, "s"))
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
    owned: bool = False,
    device: str | torch.device | None = None,
    ranks: int = 1,
    budget: int | None = None,
    rates: Rates | None = None,
    **options: Any,
) -> RoundPlan:
    """Estimate memory and work of a rule with K clients, S of them active, and d parameters.

    The formulas are in bytes. Each pass over a vector or a row counts once. Caches are ignored, and
    so are the reads that some processors issue before a write:

    ============  =================  ================================  =============
    rule          state              moved per round                   flops
    ============  =================  ================================  =============
    fedavg        0                  4Sd + 12d (+)                     2Sd
    amplified     0                  4Sd + 12d (+)                     2Sd
    fdms          6K^2 + 8           4Sd + 24d + 6K(K - S) + 52S^2     S(S + 3)d
      eliminating + K ceil(K/8)      + 4Sd + 6K^2 + 6S^2
                                     + (3K - S) ceil(K/8)
      sketch=k                       + 40Sk; eliminating without 4Sd   (***)
    mifa          4Kd + 8d           12Sd + 36d; owned 8Sd + 36d       3Sd + 3d
    mifa-client   8d + 8K            4Sd + 44d                         3Sd + 4d
    stale         4Kd + 8d + K       as mifa                           3Sd + 3d
    stale-models  4Kd + 8d + K (**)  12Sd + 36d; owned 8Sd + 52d       4Sd + 3d (**)
    mimic         4Kd (*)            12Sd + 32d; owned 8Sd + 36d       5Sd + 3d
      mode client 0                  8Sd + 20d                         2Sd + 2d
    scaffold      4Kd + 4d           12Sd + 36d                        6Sd + 6d
    mimic-aged    4Kd + 8K + 8 (*)   12Sd + 32d; owned 8Sd + 36d       5Sd + 3d
    fedvarp       as mifa            12Sd + 60d; owned 8Sd + 60d       3Sd + 6d
    fedstale      4Kd + 8d + 24K     12Sd + 44d; owned 8Sd + 44d       7Sd + 4d
    fedau         24K                as fedavg                         2Sd
    fedbuff       0                  as fedavg                         2Sd
    fdms-soft     as fdms            as fdms, + 6(K - S)S              as fdms
    median (****) 0                  4Sd + 24d                         (L + 1)Sd
    robust rules  0                  8Sd + 24d                         S(S + 3)d
      sketch=k    8                  + 40Sk                            (***)
    with reuse    4Kd                8Kd + 8Sd + 24d; owned 8Kd + 24d  see below
    ============  =================  ================================  =============

    "owned" stands for ``owned=True``: the rule takes ownership of rows instead of copying
    them. With ``memory_folder``, another ``memory_dtype`` than "float32" or streamed updates rows
    are copied in any case. With ``memory_dtype="bfloat16"`` a memory row takes 2d bytes instead of
    4d, with "int8" d + 4 ceil(d / 256).

    With ``staleness``, a rule that remembers rows or corrections keeps their rounds, as with
    ``max_age``, 8K + 8 bytes if it has no rounds otherwise; mimic and mimic-aged also keep A =
    ``max_staleness`` aggregates, 4Ad + 8A + 8 bytes, of which a round writes one, 8d.

    (+) One pass reads the rows and moves the parameters. If they are on a GPU, streamed, or spread
    over ranks, with noise, and with another server optimizer than "sgd", it is 4Sd + 24d.
    (*) With ``owned``, or if copied rows take more than 8 MB together, the rule also keeps a
    reference vector for each round in which some client was last active: at most K - S + 1 and at
    most max(4, K / 8, 2^22 / d) vectors of 4d bytes. This maximum is counted. A step reads a
    reference for each round in which one of its S clients was last active; one is counted, 4d.
    Writing corrections into their rows, to drop a reference, is not counted.
    (**) With ``owned``, as (*), but at most K - S + 1 vectors, and Sd more flops.
    (***) 6Sd + S(S + 1)k.
    (****) And trimmed-mean and meamed. L = ceil(log2 S) (ceil(log2 S) + 1) / 2 is the number of
    minima and maxima for each value in a sorting network. bulyan is one of the robust rules, and
    sorts the S - 2f chosen rows, K - 2f with ``reuse``: LSd flops more, of these.

    fdms-means with ``sketch=k`` (256 by default) has K(k + 8) bytes of state, and 40Sk + 64K more
    of scratch than fedavg. It moves 8Sd + 24d + 80Sk + (K - S)k bytes in a round, and has 6Sd +
    2(K - S)Sk flops, or fewer where it searches in clusters. bucketing has 8 bytes of state.

    These options add to the state: an adaptive ``max_norm`` 8 bytes for each norm of its window and
    8 more, an adaptive ``clip_norm`` 8, and ``server_optimizer`` 4d with one moment, 8d with two.

    Scratch is 4d for rules that only weight rows; fdms needs 16S^2 more (18S^2 with elimination).
    With sketches, it is 20Sk more, or 24Sk for the robust rules that have them.
    Of the rules with a memory, mifa, stale, fedvarp and scaffold need 8d, mimic and mimic-aged 12d,
    fedstale 16d, and stale-models 8d, or 12d with ``owned``. If they copy rows, they also need S
    spare rows, 4Sd, into which a step writes the new memory rows. With ``max_age``, these rules but
    the mimic ones need 12d and up to 3 MB more, a total without the expired rows and a row of
    zeros (with bfloat16 or int8 rows, 8d and one row), and the robust rules with ``reuse`` one row
    more. Reading expired rows is not counted.
    mifa-client needs 12d. Pieces of bfloat16 or int8 memory rows that are converted to float32 are
    not counted: up to 64 MiB (128 MiB with a stream), or 4 KiB for each converted row if that is
    more.

    The robust rules (geometric-median, centered-clip, krum, multi-krum, nnm, bucketing, bulyan)
    need 4d, about 64S^2, and 4Sd or at most 2^18 S of scratch; the last is for rounds with nearly
    equal rows (see ``fastagg.rules.common_row``), whose further pass over the rows is not counted.
    With ``reuse``, K takes the place of S in scratch, and the flops are those of the inner products
    of S rows with all K rows and of the squared norms of the other K - S rows,
    S(S + 1)d + 2(S + 1)(K - S)d, and of the aggregate, 2Kd. centered-clip has one more row, the
    previous aggregate, in all of these numbers and in its state.

    With ``max_norm``, rules without a Gram matrix read every row once more: 4Sd bytes, 2Sd flops.
    With ``clip_norm``, all rules do. Noise is not counted, nor are the spare rows of a rule that
    takes ownership of rows, which it needs for the rows that it scales down instead. The estimate
    for fdms counts all pairs; elimination saves up to the factor by which it shrinks the candidate
    sets.

    Args:
        name: one of :func:`fastagg.available`.
        num_clients: K.
        num_active: S, in [1, K].
        num_params: d.
        owned: updates will be in an :class:`fastagg.UpdateBuffer`, whose rows the rule may take
            ownership of. The 4Kd bytes of the buffer are the caller's and are not counted.
        device: where the steps will run. If given, the plan also has memory and time; the rates of
            the device are measured in this call, which takes a third of a second. Time is the sum
            of moving the bytes, the flops and, with several ranks, the wire, as if nothing
            overlapped. Reading streams from disk is not included.
        ranks: number of ranks over which the columns are spread (:mod:`fastagg.distributed`).
        budget: bytes of streamed updates that are in memory at a time, see
            :class:`fastagg.ClientFiles`; None if updates are not streamed. Rules that remember rows
            then need memory for S more rows, into which the stream is read.
        rates: rates to use instead of measuring those of ``device``.
        **options: options of the rule, as for :func:`fastagg.make`.

    Raises:
        ValueError: there is no such rule, a size is out of range, or :func:`fastagg.make` refuses
            the value of an option.
        TypeError: the rule has no such option, or a required one is missing, or a size is not an
            int.
    """
    rule = find(name, list(options))
    K, S = read_size("num_clients", num_clients), read_size("num_active", num_active)
    d = read_size("num_params", num_params)
    if S > K:
        raise ValueError(f"num_active: expected at most num_clients, {K}, got {S}")
    check_options(rule, K, options)
    if rates is None and device is not None:
        rates = measure(device)
    sketched = None
    exact = option_defaults(rule).get("sketch", 0) is None and not options.get("sketch")
    if rates is not None and exact:
        sketched = _sketched_seconds(
            name,
            rates,
            num_clients=num_clients,
            num_active=num_active,
            num_params=num_params,
            owned=owned,
            ranks=ranks,
            budget=budget,
            **options,
        )
    own = -(-d // read_size("ranks", ranks))
    plain = (
        options.get("memory_folder") is None and options.get("memory_dtype", "float32") == "float32"
    )
    keeps = owned and plain and budget is None  # otherwise rows are copied
    sizes = Sizes(K, S, own, keeps)
    cost = rule.cost(sizes, options)
    messages = _MESSAGES
    noise = options.get("noise_multiplier") or 0.0
    max_norm = resolve_max_norm(options.get("max_norm", "auto"), options.get("nonfinite"), noise)
    clip_norm = options.get("clip_norm")
    moments = optimizer_cost(options.get("server_optimizer", "sgd"), own)
    on_gpu = device is not None and read_device_name(device).type != "cpu"
    noisy = bool(noise)
    apart = on_gpu or noisy or budget is not None or ranks > 1 or moments.moved > 0
    if rule.moves_at_once and not apart:
        # Not twice the aggregate, and the parameters, for their magnitudes and the move.
        cost = replace(cost, moved=cost.moved - 12 * own)
    cost = replace(
        cost,
        state=cost.state + norm_bytes(max_norm) + clip_bytes(clip_norm) + moments.state,
        moved=cost.moved + moments.moved,
        flops=cost.flops + moments.flops,
    )
    # norms need another pass
    if clip_norm is not None or (max_norm is not None and not rule.norms_known):
        cost = replace(
            cost,
            moved=cost.moved + 4 * S * own,
            flops=cost.flops + 2 * S * own,
            reduced=cost.reduced + 8 * S,
        )
        messages += 1
    updates = 4 * own + (0 if owned else 4 * S * own)
    if budget is not None:
        updates = 4 * own + read_size("budget", budget)
    if budget is not None and rule.collects_streams:
        cost = replace(cost, scratch=cost.scratch + 4 * S * own)
    wire = 0
    if ranks > 1:
        wire = 2 * cost.reduced + messages * _MESSAGE * ranks + 8 * (S + 2)
        cost = replace(cost, scratch=cost.scratch + cost.reduced * _parts(d, own, S, budget))
    seconds = None if rates is None else _seconds(cost, wire, ranks, rates)
    if sketched is not None and rates is not None:
        exact_seconds = _seconds(cost, wire, ranks, rates, at_once=True)
        sketched = sketched if sketched <= _WORTHWHILE * exact_seconds else None
    return RoundPlan(
        name,
        K,
        S,
        d,
        owned,
        cost.state + cost.references,
        cost.scratch,
        cost.moved,
        cost.flops,
        ranks,
        budget,
        updates,
        wire,
        seconds,
        0 if on_gpu else _kernel_bytes(rule, sizes, d, options),
        sketched,
    )


def _sketched_seconds(name: str, rates: Rates, **arguments: Any) -> float | None:
    """Return the time of a round with sketches, other arguments as for :func:`plan`.

    None: the rule takes no sketches with these options, such as ``reuse``.
    """
    try:
        return plan(name, rates=rates, **{**arguments, "sketch": _BUCKETS}).seconds
    except ValueError:
        return None


def _kernel_bytes(
    rule: type[Aggregator[Any, Any]], sizes: Sizes, num_params: int, options: Mapping[str, Any]
) -> int:
    """Return the bytes that the Gram kernel takes for one segment; 0 for rules without it."""
    if not rule.computes_gram:
        return 0
    reuse = options.get("reuse", False)
    rows = sizes.K if reuse else sizes.S
    if rows > ops.MOST_ROWS:
        name = "num_clients" if reuse else "num_active"
        raise ValueError(f"{name}: expected at most {ops.MOST_ROWS} for {rule.name!r}, got {rows}")
    columns = options.get("sketch") or min(sizes.d, segment_columns(num_params))
    return ops.gram_scratch(rows, columns)


def _parts(num_params: int, own: int, size: int, budget: int | None) -> int:
    """Return the number of Gram matrices of pieces that a rank keeps, to add them in order."""
    widest = min(segment_columns(num_params), own)
    piece = widest if budget is None else piece_columns(budget, size, widest)
    return -(-own // piece)


def _seconds(cost: Cost, wire: int, ranks: int, rates: Rates, *, at_once: bool = False) -> float:
    """Return the time of a round; reductions go through the ranks in turn.

    at_once: whether arithmetic takes place while memory is read, and not after it.
    """
    moved, flops, sketching = cost.moved, cost.flops, 0.0
    if rates.sketched_per_s is not None:
        moved, flops = moved - 4 * cost.sketched, flops - 6 * cost.sketched
        sketching = cost.sketched / rates.sketched_per_s
    reading, computing = moved / rates.bytes_per_s, flops / rates.flops_per_s
    work = (max(reading, computing) if at_once else reading + computing) + sketching
    hops = (ranks - 1) * cost.reduced + wire
    return work + (hops / rates.wire_bytes_per_s if ranks > 1 else 0.0)


def _short(value: float) -> str:
    """Format a number with three digits and a decimal prefix: "12.3 M"."""
    if 0 < value < 0.9995:
        return f"{1e3 * value:.3g} m"
    for prefix in _UNITS[:-1]:
        if value < 999.5:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} {_UNITS[-1]}"
