# SPDX-License-Identifier: Apache-2.0
"""An aggregator whose columns are spread over the ranks of ``torch.distributed``."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastagg import ops
from fastagg.aggregator import Aggregator
from fastagg.checkpoint import CheckpointError
from fastagg.clipping import AdaptiveClip, ClipNorm, read_clip_norm
from fastagg.distributed import storage
from fastagg.distributed.ranks import Ranks, ShardedColumns
from fastagg.distributed.shards import default_segment, shard_bounds
from fastagg.loading import (
    changed_bounds,
    check_saved,
    check_state_options,
    merged_options,
    raise_for,
    set_bounds,
)
from fastagg.making import make
from fastagg.modes import plain_modes
from fastagg.norm_bound import AdaptiveNorm, MaxNorm
from fastagg.options import read_size
from fastagg.registry import RuleName
from fastagg.report import StepReport
from fastagg.rules.mifa_client import MIFADifferences
from fastagg.signals import SignalsDeferred
from fastagg.updates.buffer import Clients
from fastagg.updates.cohort import Ages, Updates, read_cohort, read_ids


class Loaded(NamedTuple):
    """The content of a checkpoint; see the arguments of :meth:`ShardedAggregator.save`.

    Attributes:
        aggregator: the aggregator, with this rank's columns.
        columns: this rank's part of the further tensors.
        notes: the notes.
    """

    aggregator: ShardedAggregator
    columns: dict[str, Tensor]
    notes: dict[str, Any]


class ShardedAggregator:
    """Any rule, with the columns of parameters, updates and memory spread over ranks.

    Every rank holds the columns [begin, end) of every vector and matrix with d columns, and a copy
    of everything else (scores, counts, weights). All ranks must make the same calls in the same
    order, with the same clients. Ranks exchange results of S x S or K x K numbers and a few
    messages, never rows.

    **Bits.** Reports, parameters and state are bit-identical for any number of ranks with the same
    ``segment``. They also equal those of a single process if its segment is the same. By default it
    is, if a single process has at least one segment for each rank: with 2^20 columns per rank or
    more for d up to 2^28, and with up to 128 ranks for any larger d. With more ranks the default
    segment is smaller. Then only the sums inside Gram matrices are computed in another order, which
    changes an entry by less than 1e-8 of the product of the two norms. The constructor refuses
    ranks whose processors or libraries compute different bits.

    **Failures.** A step that one rank refuses is refused on all ranks and changes nothing on any:
    ranks agree on the arguments before they compute, and on the result just before they write. If a
    rank is gone, the others raise a :class:`RankError` within the timeout of the process group, and
    their parameters and state are as before the step. (If the rank is lost just after the agreement
    on the result, the others may be one step ahead of it.) Then start all ranks again from the last
    checkpoint.

    Args:
        rule: one of :func:`fastagg.available`.
        num_clients: K.
        num_params: d, the number of columns of all ranks together.
        group: ``torch.distributed`` process group with gloo or NCCL; None is the default group.
            NCCL without gloo is experimental (docs/cuda.md). The aggregator keeps a reference to a
            given group: delete it before ``destroy_process_group``.
        segment: columns of a segment; each rank gets whole segments. None is that of a single
            process, or less as described above.
        **options: options of the rule, the same on all ranks.

    Attributes:
        bounds: the columns (begin, end) of each rank.
        begin, end: the columns of this rank.
        num_own: number of columns of this rank, end - begin.
        local: the rule, with this rank's columns.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised, or has only NCCL and this process
            sees no GPU.
        RankError: ranks have different arguments or compute different bits, or a rank is gone.
        TypeError, ValueError: an option of the rule is wrong, or the group has neither gloo nor
            NCCL.
    """

    # An option of the rule that has no property here cannot be assigned: it would have no effect.
    __slots__ = ("_ranks", "begin", "bounds", "end", "local", "num_own", "num_params", "segment")

    def __init__(
        self,
        rule: str,
        /,
        *,
        num_clients: int,
        num_params: int,
        group: dist.ProcessGroup | None = None,
        segment: int | None = None,
        **options: Any,
    ) -> None:
        self._ranks = Ranks(group)
        self.num_params = read_size("num_params", num_params)
        if segment is None:
            segment = default_segment(self.num_params, self._ranks.size)
        self.segment = read_size("segment", segment)
        given = [rule, num_clients, num_params, segment, {**options}, _numerics()]
        self._ranks.agree("the options and the numerics of all ranks", given)
        self.bounds = shard_bounds(self.num_params, self._ranks.size, self.segment)
        self.begin, self.end = self.bounds[self._ranks.rank]
        self.num_own = self.end - self.begin
        with self._ranks.succeeding_together("making the rule"):
            self.local: Aggregator = make(
                RuleName(rule), num_clients=num_clients, num_params=self.num_own, **options
            )
            self._check_blocks()
            _check_count_noise(self.local.clip_norm)
        self.local.columns = ShardedColumns(self.segment, self.begin, self._ranks)

    def _check_blocks(self) -> None:
        """Raise ValueError if a block of columns that share a state would be on two ranks."""
        blocks = self.local.column_blocks
        for name in sorted(blocks.keys() & self.local.live_state().keys()):
            if self.segment % blocks[name]:
                raise ValueError(
                    f"segment: expected a multiple of {blocks[name]} columns, which share one "
                    f"number of {name}, got {self.segment}"
                )

    @property
    def server_lr(self) -> float:
        """The server learning rate; set it on all ranks."""
        return self.local.server_lr

    @server_lr.setter
    def server_lr(self, value: float) -> None:
        self.local.server_lr = value

    @property
    def max_norm(self) -> MaxNorm:
        """The largest norm that a row may have, over all columns; set it on all ranks."""
        return self.local.max_norm

    @max_norm.setter
    def max_norm(self, value: float | str | AdaptiveNorm | Mapping[str, Any] | None) -> None:
        self.local.max_norm = value

    @property
    def min_active(self) -> int:
        """The least number of active clients of a round; set it on all ranks."""
        return self.local.min_active

    @min_active.setter
    def min_active(self, value: int) -> None:
        self.local.min_active = value

    @property
    def clip_norm(self) -> ClipNorm:
        """The norm, over all columns, to which longer rows are scaled down; set it on all ranks."""
        return self.local.clip_norm

    @clip_norm.setter
    def clip_norm(self, value: float | str | AdaptiveClip | Mapping[str, Any] | None) -> None:
        _check_count_noise(read_clip_norm(value))
        self.local.clip_norm = value

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of the noise, in units of the sensitivity; set it on all ranks."""
        return self.local.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self.local.noise_multiplier = value

    @property
    def num_clients(self) -> int:
        return self.local.num_clients

    def own(self, whole: Tensor) -> Tensor:
        """Copy this rank's columns of a tensor [..., d] into a new tensor [..., num_own]."""
        _check_last("whole", whole, self.num_params)
        return whole[..., self.begin : self.end].clone(memory_format=torch.contiguous_format)

    def gather(self, own: Tensor, *, block: int = 1) -> Tensor:
        """Assemble [..., d] from the columns [..., num_own] of every rank.

        All ranks must call it. Every rank gets the whole tensor, which must fit into its memory.

        Args:
            own: the columns of this rank.
            block: number of columns for each element of the last dimension, which divides
                ``segment``: 256 for the state ``memory_scales``.

        Raises:
            ValueError: the tensor of this rank has another number of columns.
            RankError: another rank refused its tensor, its other dimensions or dtype differ, or a
                rank is gone.
        """
        with self._ranks.failing_together("gathering columns"):
            width = -(-self.num_own // read_size("block", block))
            _check_last("own", own, width)
            bounds = [(begin // block, -(-end // block)) for begin, end in self.bounds]
        return self._ranks.gather_columns(own, bounds)

    @torch.no_grad()
    def step(
        self,
        params: Tensor,
        updates: Updates,
        clients: Clients,
        *,
        ages: Ages | None = None,
        weights: Any = None,
    ) -> StepReport:
        """Run :meth:`fastagg.Aggregator.step` on this rank's columns. All ranks must call it.

        Args:
            params: [num_own] float32; changed in place.
            updates: [S, num_own] float32, or any other form that :meth:`fastagg.Aggregator.step`
                takes.
            clients: S ids, the same on all ranks, in any order.
            ages: S ages, as for :meth:`fastagg.Aggregator.step`, the same on all ranks.
            weights: likewise.

        Returns:
            The report, the same on all ranks.

        Raises:
            TypeError, ValueError, IndexError: the arguments of this rank are wrong, or, on all
                ranks, updates are not finite or too large.
            RankError: another rank refused the step or has other arguments, or a rank is gone.
        """
        error: Exception | None = None
        common: list[object] = []  # must be equal on all ranks
        try:
            cohort = read_cohort(
                params,
                updates,
                clients,
                num_clients=self.num_clients,
                num_params=self.num_own,
                device=self.local.device,
                ages=ages,
                repeats=self.local.repeats_clients,
                weights=weights,
            )
            local = self.local
            common = [cohort.clients, cohort.ages, cohort.weights, cohort.streamed]
            common += [local.server_lr, local.nonfinite, local.max_norm, local.min_active]
            common += [local.clip_norm, local.noise_multiplier]
        except Exception as found:  # agree raises it after the other ranks know of it
            error = found
        self._ranks.agree("the arguments of the step", common, error)
        with self._ranks.failing_together("the step"):
            return self.local.step(params, updates, clients, ages=ages, weights=weights)

    @torch.no_grad()
    def forget(self, clients: Clients) -> None:
        """Run :meth:`fastagg.Aggregator.forget` on this rank's columns. All ranks must call it.

        Raises:
            TypeError, ValueError, IndexError: the ids of this rank are wrong. Nothing has changed.
            RankError: another rank has other ids or has failed, or a rank is gone.

        After an exception no rank has changed.
        """
        ids = self._agreed_ids("the clients to forget", clients)
        restore = None
        try:
            with self._ranks.succeeding_together("forgetting clients"):
                restore = self.local._kept(ids)
                self.local.forget(ids)
        except Exception:
            if restore is not None:
                restore()
            raise

    @torch.no_grad()
    def withdraw(self, rows: Tensor, clients: Clients) -> None:
        """Run ``withdraw`` of the rule ``mifa-client`` on this rank's columns. All ranks call it.

        Args:
            rows: [n, num_own] float64 or float32, this rank's columns of the clients' rows.
            clients: n ids, the same on all ranks.

        Raises:
            TypeError, ValueError, IndexError: an argument of this rank is wrong, or the rule is
                another one.
            RankError: another rank has other ids or wrong rows, or a rank is gone.

        After an exception no rank has changed.
        """
        if not isinstance(self.local, MIFADifferences):
            raise TypeError(f"withdraw: expected the rule 'mifa-client', got {self.local.name!r}")
        ids = self._agreed_ids("the clients that withdraw", clients)
        with self.local._alone("withdraw"), plain_modes():
            with self._ranks.succeeding_together("withdrawing clients"):
                left = copy.copy(self.local)  # a call replaces its tensors, and writes to none
                left.withdraw(rows, ids)
            with SignalsDeferred():
                self.local._become(left)

    def _agreed_ids(self, what: str, clients: Clients) -> list[int]:
        """Return ids of clients, if they are valid and the same on all ranks."""
        error: Exception | None = None
        ids: list[int] = []
        try:
            ids = read_ids(clients, self.num_clients)
        except Exception as found:  # agree raises it after the other ranks know of it
            error = found
        self._ranks.agree(what, ids, error)
        return ids

    @torch.no_grad()
    def grow(self, num_clients: int, **options: Any) -> None:
        """Run :meth:`fastagg.Aggregator.grow` on this rank's columns. All ranks must call it.

        Raises:
            TypeError, ValueError: an argument of this rank is wrong.
            RankError: another rank has other arguments or no room, or a rank is gone.

        After an exception no rank has changed.
        """
        self._ranks.agree("the arguments of grow", [num_clients, {**options}])
        with self.local._alone("grow"), plain_modes():
            with self._ranks.succeeding_together("growing the rule"):
                grown = self.local._grown(num_clients, options)
            with SignalsDeferred():
                self.local._become(grown)

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of this rank's state."""
        return self.local.state_dict()

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        columns: Mapping[str, Tensor] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint: one file per rank and a manifest. All ranks must call it.

        A crash at any moment leaves either the previous checkpoint or the new one. A step of
        another thread is waited for; all ranks must make their calls in the same order.

        Args:
            folder: a folder on a file system that all ranks share; created if it does not exist.
            columns: further tensors [..., num_own] to store with the state and spread over ranks
                like it, such as ``{"params": params}``.
            notes: further values to store, such as the number of rounds; anything that JSON
                represents, so neither NaN nor Inf. :meth:`load` returns tuples as lists, and names
                as texts. The notes of rank 0 are stored, those of other ranks are ignored.

        Raises:
            OSError, TypeError, ValueError: this rank could not write, or JSON does not represent
                ``notes``. The previous checkpoint is unchanged.
            RankError: another rank could not write. The previous checkpoint is unchanged.
        """
        columns = {} if columns is None else columns
        with self._ranks.failing_together("the columns of the checkpoint"):
            if notes is not None and not isinstance(notes, Mapping):
                raise TypeError(f"notes: expected a mapping, got {type(notes).__name__}")
            if not isinstance(columns, Mapping):
                raise TypeError(f"columns: expected a mapping, got {type(columns).__name__}")
            for name, tensor in columns.items():
                if not isinstance(name, str):
                    raise TypeError(f"columns: expected names as keys, got {name!r}")
                _check_last(f"columns: {name}", tensor, self.num_own)
        with self.local.held("save"), plain_modes():
            state = self.local.live_state()
            split = {
                name: state.pop(name) for name in sorted(self.local.whole_column_state & set(state))
            }
            if self._ranks.rank > 0:
                state.clear()  # equal on all ranks, so only rank 0 writes it
            manifest = storage.Manifest(
                rule=self.local.name,
                num_params=self.num_params,
                segment=self.segment,
                bounds=self.bounds,
                generation=storage.new_generation(self._ranks),
                split=list(split),
                columns=sorted(columns),
                notes=dict(notes or {}),
            )
            storage.write(
                folder, manifest, self.local.options(), state | split, columns, self._ranks
            )

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> Loaded:
        """Load a checkpoint of :meth:`save`; later steps are bit-identical. All ranks must call it.

        The number of ranks may differ from that of :meth:`save`; it is at most the number of
        segments.

        Args:
            folder: folder of the checkpoint.
            group: as for the constructor.
            **options: options that replace the stored ones, such as ``memory_folder``; not
                ``num_params``.

        Returns:
            The aggregator, this rank's part of the further tensors, and the notes.

        Raises:
            FileNotFoundError: this rank found no checkpoint.
            CheckpointError: a ValueError. The checkpoint is damaged, or holds no possible state.
            TypeError, ValueError: one of ``options`` is wrong, or there are too many ranks.
            RankError: another rank could not load it.
        """
        ranks = Ranks(group)
        error: Exception | None = None
        manifest = None
        saved: dict[str, Any] = {}
        try:
            found_there = storage.describe(folder)
            manifest = found_there.manifest
            saved = {"max_norm": None} | found_there.options | {"num_params": manifest.num_params}
            if options.get("num_params", manifest.num_params) != manifest.num_params:
                raise ValueError(
                    f"num_params: expected {manifest.num_params}, the columns of the checkpoint, "
                    f"got {options['num_params']!r}"
                )
            check_saved(
                folder,
                manifest.rule,
                saved,
                options,
                found_there.state_bytes,
                ranks=ranks.size,
            )
        except Exception as found:  # agree raises it after the other ranks know of it
            error = found
        ranks.agree("reading the checkpoint", manifest, error)
        assert manifest is not None
        shard_bounds(manifest.num_params, ranks.size, manifest.segment)  # raises for many ranks
        first = Path(folder) / manifest.file(0)  # it holds the options
        try:
            merged = merged_options(saved, options)
            agg = cls(manifest.rule, group=group, segment=manifest.segment, **merged)
            check_state_options(agg.local, saved, options)
        except (TypeError, ValueError) as failure:
            raise_for(first, failure, options)
        state: Mapping[str, Tensor] = {}
        further: dict[str, Tensor] = {}
        try:
            state, further = storage.read(
                folder, manifest, agg.begin, agg.end, agg.local.column_blocks
            )
        except Exception as found:  # agree raises it after the other ranks know of it
            error = found
        ranks.agree("reading the checkpoint", error=error)
        try:
            with ranks.succeeding_together("loading the state"):
                agg.local.load_state_dict(state)
        except (TypeError, ValueError) as failure:
            raise CheckpointError(folder, failure) from failure
        bounds = changed_bounds(saved, options)
        ranks.agree("the options of all ranks", bounds)
        with ranks.succeeding_together("setting the options"):
            set_bounds(agg, bounds)
        return Loaded(agg, further, manifest.notes)

    def __repr__(self) -> str:
        return (
            f"ShardedAggregator({self.local.name!r}, num_clients={self.num_clients}, "
            f"num_params={self.num_params}, columns={self.begin}:{self.end}, "
            f"rank={self._ranks.rank} of {self._ranks.size})"
        )


def _check_last(name: str, value: object, width: int) -> None:
    """Raise TypeError or ValueError if ``value`` is no tensor [..., width]."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.ndim == 0 or value.shape[-1] != width:
        raise ValueError(f"{name}: expected a last dimension of {width}, got {[*value.shape]}")


def _check_count_noise(clip_norm: ClipNorm) -> None:
    """Raise ValueError if every rank would draw noise of its own for a count of all."""
    if isinstance(clip_norm, AdaptiveClip) and clip_norm.count_noise > 0.0:
        raise ValueError(
            "clip_norm: count_noise: expected 0, because every rank would draw its own noise for "
            f"the bound that all ranks share, got {clip_norm.count_noise:g}"
        )


def _numerics() -> list[object]:
    """Return torch's version and the results of a small computation, to be compared over ranks.

    Policies run on every rank. They draw the same conclusions from the same numbers only if
    processors and libraries compute the same bits.
    """
    numbers = torch.arange(1, 4 * 1024 + 1, dtype=torch.float32, device="cpu")
    probe = numbers.reciprocal_().view(4, 1024)
    gram = ops.gram(probe, dtype=torch.float64)
    scores = ops.cosine_scores(gram)
    total = torch.tensor(math.fsum(scores.flatten()), device="cpu")
    others = [gram.sqrt(), gram.sum(dim=1), scores.exp(), total]
    return [torch.__version__, torch.backends.cpu.get_cpu_capability(), gram, scores, *others]
