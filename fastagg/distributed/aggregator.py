# SPDX-License-Identifier: Apache-2.0
"""An aggregator whose columns are spread over ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastagg import ops
from fastagg.aggregator import Aggregator, StepReport
from fastagg.distributed import storage
from fastagg.distributed.ranks import Ranks, ShardedColumns
from fastagg.distributed.shards import default_segment, shard_bounds
from fastagg.options import read_size
from fastagg.registry import make
from fastagg.updates.buffer import Clients
from fastagg.updates.cohort import Updates, read_cohort


class Loaded(NamedTuple):
    """What a checkpoint had: see :meth:`ShardedAggregator.save`."""

    aggregator: ShardedAggregator
    columns: dict[str, Tensor]
    notes: dict[str, Any]


class ShardedAggregator:
    """Any rule, with parameters, updates and memory spread by columns over ranks.

    Every rank holds the columns [begin, end) of everything that has d of them, and a copy of
    everything else (scores, counts, weights). All ranks make the same calls with the same clients,
    in the same order of calls. What travels is S x S or K x K numbers and a few messages.

    **Bits.** Reports, parameters and state are bit-identical for any number of ranks with the same
    ``segment``, and the same as in one process if that is its segment too: always with
    d >= 2^20 columns a rank, the default. With smaller shards the default segment is smaller; then
    only sums inside Gram matrices are taken in another order, which changes their entries by
    less than 1e-8 of the product of the two norms. Ranks whose processors or libraries do not give
    the same bits are refused at the beginning.

    **Failures.** A step that one rank refuses is refused on all, and changes nothing on any: ranks
    agree on arguments before, and on the result just before writing. If a rank is gone the others
    get a :class:`RankError` within the timeout of the process group, parameters and state being as
    before the step (a rank lost in the instant after the agreement may leave the others one step
    ahead of it). Then start all again from the last checkpoint.

    Args:
        rule: one of :func:`fastagg.available`.
        num_clients: K.
        num_params: d, of all ranks together.
        group: ``torch.distributed`` process group, of gloo or NCCL; None: all ranks. One that is
            given is kept: drop the aggregator before ``destroy_process_group``.
        segment: columns of a segment, of which each rank has whole ones; None: 2^20, see above.
        **options: those of the rule, the same on all ranks.

    Attributes:
        bounds: the columns of each rank.
        begin, end: this rank's.
        num_own: how many these are.
        local: the rule with this rank's columns.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised, or has only NCCL and no GPU.
        RankError: ranks were given something different, or are gone.
        TypeError, ValueError: as the rule does; the group has neither gloo nor NCCL.
    """

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
                rule, num_clients=num_clients, num_params=self.num_own, **options
            )
        self.local.columns = ShardedColumns(self.segment, self._ranks)

    @property
    def server_lr(self) -> float:
        """The server learning rate; set it on all ranks."""
        return self.local.server_lr

    @server_lr.setter
    def server_lr(self, value: float) -> None:
        self.local.server_lr = value

    @property
    def max_norm(self) -> float | None:
        """The largest norm that a row may have, over the columns of all ranks; set it on all."""
        return self.local.max_norm

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        self.local.max_norm = value

    @property
    def num_clients(self) -> int:
        return self.local.num_clients

    def own(self, whole: Tensor) -> Tensor:
        """This rank's columns of [..., d]: a new tensor [..., num_own]."""
        if whole.shape[-1] != self.num_params:
            raise ValueError(
                f"whole: expected a last dimension of {self.num_params}, got {list(whole.shape)}"
            )
        return whole[..., self.begin : self.end].clone(memory_format=torch.contiguous_format)

    def gather(self, own: Tensor) -> Tensor:
        """[..., d] on all ranks, from every rank's [..., num_own]. For models that fit."""
        if own.shape[-1] != self.num_own:
            raise ValueError(
                f"own: expected a last dimension of {self.num_own}, got {list(own.shape)}"
            )
        return self._ranks.gather_columns(own, self.bounds)

    @torch.no_grad()
    def step(self, params: Tensor, updates: Updates, clients: Clients) -> StepReport:
        """:meth:`fastagg.Aggregator.step` on this rank's columns; all ranks must call it.

        Args:
            params: [num_own] float32; changed in place.
            updates: [S, num_own] float32, or any other form that a rule takes.
            clients: S ids, the same on all ranks, in any order.

        Returns:
            The same report on all ranks.

        Raises:
            TypeError, ValueError, IndexError: on the rank whose arguments are wrong, or on all
                ranks where the updates are (not finite, too large).
            RankError: another rank refused, has other arguments, or is gone.
        """
        error: Exception | None = None
        meant: list[object] = []
        try:
            cohort = read_cohort(
                params,
                updates,
                clients,
                num_clients=self.num_clients,
                num_params=self.num_own,
                device=self.local.device,
            )
            local = self.local
            meant = [cohort.clients, cohort.streamed]
            meant += [local.server_lr, local.nonfinite, local.max_norm]
        except Exception as found:  # raised again by agree, after the other ranks know
            error = found
        self._ranks.agree("the arguments of the step", meant, error)
        with self._ranks.failing_together("the step"):
            return self.local.step(params, updates, clients)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of this rank's state."""
        return self.local.state_dict()

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        columns: Mapping[str, Tensor] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint: one file a rank and a manifest. All ranks must call it.

        A crash at any moment leaves the checkpoint that was there before, or the new one.

        Args:
            folder: on a file system that all ranks share; made if it does not exist.
            columns: further tensors [..., num_own] to keep beside the state and to be split like
                it, such as ``{"params": params}``.
            notes: what else to keep, such as the number of rounds: what JSON holds. Rank 0's are.

        Raises:
            RankError: a rank could not write; the folder then has the old checkpoint.
            OSError, ValueError: on the rank that could not.
        """
        columns = columns or {}
        with self._ranks.failing_together("the columns of the checkpoint"):
            for name, tensor in columns.items():
                if tensor.ndim == 0 or tensor.shape[-1] != self.num_own:
                    raise ValueError(
                        f"{name}: expected a last dimension of {self.num_own}, "
                        f"got {[*tensor.shape]}"
                    )
        state = self.local.live_state()
        split = {name: state.pop(name) for name in sorted(self.local.column_state & set(state))}
        if self._ranks.rank > 0:
            state.clear()  # the same everywhere: rank 0 writes it
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
        storage.write(folder, manifest, self.local.options(), state | split, columns, self._ranks)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> Loaded:
        """Go on from :meth:`save`, bit-identically, with any number of ranks up to the segments'.

        Args:
            folder: of the checkpoint.
            group: as for the constructor.
            **options: to be other than they were, such as ``memory_folder``.

        Returns:
            The aggregator, this rank's part of the further tensors, and the notes.

        Raises:
            FileNotFoundError, ValueError: there is no checkpoint, or it is damaged.
            RankError: on the other ranks.
        """
        ranks = Ranks(group)
        error: Exception | None = None
        manifest = None
        try:
            manifest, saved = storage.read_manifest(folder)
        except Exception as found:  # raised again by agree
            error = found
        ranks.agree("reading the checkpoint", manifest, error)
        assert manifest is not None
        saved |= {"num_params": manifest.num_params} | options
        agg = cls(manifest.rule, group=group, segment=manifest.segment, **saved)
        state: Mapping[str, Tensor] = {}
        further: dict[str, Tensor] = {}
        try:
            state, further = storage.read(folder, manifest, agg.begin, agg.end)
        except Exception as found:  # raised again by agree
            error = found
        ranks.agree("reading the checkpoint", error=error)
        with ranks.succeeding_together("loading the state"):
            agg.local.load_state_dict(state)
        return Loaded(agg, further, manifest.notes)

    def __repr__(self) -> str:
        return (
            f"ShardedAggregator({self.local.name!r}, num_clients={self.num_clients}, "
            f"num_params={self.num_params}, columns={self.begin}:{self.end}, "
            f"rank={self._ranks.rank} of {self._ranks.size})"
        )


def _numerics() -> list[object]:
    """What must be equal for ranks to draw the same conclusions from the same numbers."""
    probe = torch.arange(1, 4 * 1024 + 1, dtype=torch.float32).reciprocal_().view(4, 1024)
    gram = ops.gram(probe, dtype=torch.float64)
    scores = ops.cosine_scores(gram)
    others = [gram.sqrt(), gram.sum(dim=1), scores.exp(), torch.tensor(math.fsum(scores.flatten()))]
    return [torch.__version__, torch.backends.cpu.get_cpu_capability(), gram, scores, *others]
