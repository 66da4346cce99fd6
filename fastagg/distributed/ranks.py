# SPDX-License-Identifier: Apache-2.0
"""What the ranks say to each other: sums in rank order, maxima, and whether all agree.

Everything that travels is a tensor of a known size; nothing is pickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from fastagg.updates.columns import Columns

_DIGEST = 32
_TEXT = 479  # with status and digest, a message has 512 bytes
_MAGNITUDE = 0x7FFFFFFF


class RankError(RuntimeError):
    """Another rank failed, is gone, or was about to do something else.

    Parameters and state of this rank are as before the call. If a rank is gone, the process group
    is of no use any more: end the processes and start them again from the last checkpoint.
    """


class Ranks:
    """The collectives of one process group.

    Args:
        group: of ``torch.distributed``; None: all ranks.

    Attributes:
        rank, size: of this process, and of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed is not initialised: launch with torchrun and call "
                "torch.distributed.init_process_group first"
            )
        # None stays None: destroy_process_group must find the last reference to the group. One that
        # lives on until the interpreter ends takes threads of gloo with it, which then abort.
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._device = message_device(dist.get_backend_config(group))

    @contextmanager
    def _talk(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch has no narrower class for gloo's
            raise RankError(
                f"rank {self.rank} of {self.size} got no answer in {what}: another rank is gone, "
                f"has failed or is too late ({error}). Parameters and state are as before; start "
                "all ranks again from the last checkpoint"
            ) from error

    def add_in_order(self, parts: list[Tensor]) -> Tensor:
        """((p_0 + p_1) + p_2) + ... over the parts of rank 0, then of rank 1, ...: the same bits
        however they are spread. Each rank has at least one part, all [n] float64."""
        self.agree("a sum over columns")
        total = parts[0].to(self._device)
        rest = parts[1:]
        with self._talk("a sum over columns"):
            if self.rank > 0:
                total, rest = torch.empty_like(total), parts
                dist.recv(total, self._global(self.rank - 1), group=self.group)
            for part in rest:
                total += part.to(self._device)
            if self.rank < self.size - 1:
                dist.send(total, self._global(self.rank + 1), group=self.group)
            dist.broadcast(total, self._global(self.size - 1), group=self.group)
        return total.to(parts[0].device)

    def largest(self, values: Tensor) -> Tensor:
        """The largest over ranks, [n] int32."""
        self.agree("a maximum")
        wire = values.to(self._device, copy=True)
        with self._talk("a maximum"):
            dist.all_reduce(wire, dist.ReduceOp.MAX, group=self.group)
        return wire.to(values.device)

    def agree(self, what: str, same: object = None, error: Exception | None = None) -> None:
        """Go on only if all ranks can, and mean the same by it.

        All that ranks do together begins with this, so a rank that has failed can call it, whatever
        the others are about to do.

        Args:
            what: the ranks are about to do; must be the same.
            same: what else must be, as :func:`digest_of` takes it.
            error: why this rank cannot go on; raised here after the others know.

        Raises:
            RankError: another rank cannot go on, or means something else.
        """
        digest = digest_of([what, same])
        text = "" if error is None else f"{type(error).__name__}: {error}"
        message = bytes([error is not None]) + digest + text.encode()[:_TEXT].ljust(_TEXT, b"\0")
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)
        received = [torch.empty_like(own) for _ in range(self.size)]
        with self._talk(what):
            dist.all_gather(received, own, group=self.group)
        if error is not None:
            raise error
        messages = [bytes(tensor.tolist()) for tensor in received]
        for rank, other in enumerate(messages):
            if other[0]:
                reason = other[1 + _DIGEST :].rstrip(b"\0").decode(errors="replace")
                raise RankError(f"{what}: rank {rank} of {self.size} refused: {reason}")
        different = [r for r, m in enumerate(messages) if m[1 : 1 + _DIGEST] != digest]
        if different:
            raise RankError(
                f"{what}: expected the same on all ranks, but rank(s) {different} differ from rank "
                f"{self.rank}"
            )

    @contextmanager
    def failing_together(self, what: str) -> Iterator[None]:
        """An error on this rank is one on all."""
        try:
            yield
        except RankError:  # they know
            raise
        except Exception as error:
            self.agree(what, error=error)
            raise

    @contextmanager
    def succeeding_together(self, what: str) -> Iterator[None]:
        """The same for what ends without a message: nobody goes on before all have done it."""
        with self.failing_together(what):
            yield
        self.agree(what)

    def share(self, value: int) -> int:
        """Rank 0's value, in [0, 2^62)."""
        self.agree("a broadcast")
        wire = torch.tensor([value], dtype=torch.int64, device=self._device)
        with self._talk("a broadcast"):
            dist.broadcast(wire, self._global(0), group=self.group)
        return int(wire)

    def gather_columns(self, own: Tensor, bounds: list[tuple[int, int]]) -> Tensor:
        """[..., d] from every rank's columns [..., n], on all ranks."""
        self.agree("gathering columns", [own.shape[:-1], own.dtype])
        whole = own.new_empty(*own.shape[:-1], bounds[-1][1])
        with self._talk("gathering columns"):
            for rank, (begin, end) in enumerate(bounds):
                part = own.new_empty(*own.shape[:-1], end - begin)
                part = (own.contiguous() if rank == self.rank else part).to(self._device)
                dist.broadcast(part, self._global(rank), group=self.group)
                whole[..., begin:end] = part.to(own.device)
        return whole

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def message_device(backends: str) -> torch.device:
    """Where messages must be to be sent: on the CPU if gloo is there, else, for NCCL, on a GPU.

    The aggregator's own device does not matter. What ranks send is small and made on the CPU by
    policies, so NCCL is used only where it is all there is.

    Args:
        backends: as ``torch.distributed.get_backend_config`` has them, ``"cpu:gloo,cuda:nccl"``.

    Raises:
        ValueError: there is neither gloo for the CPU nor NCCL for GPUs.
        RuntimeError: there is only NCCL, and this process sees no GPU.
    """
    by_device = dict(pair.split(":") for pair in backends.split(","))
    if by_device.get("cpu") == "gloo":
        return torch.device("cpu")
    if by_device.get("cuda") != "nccl":
        raise ValueError(f"group: expected gloo for the CPU or nccl for GPUs, got {backends}")
    if not torch.cuda.is_available():
        raise RuntimeError("group: nccl sends from GPUs, and PyTorch sees none here; use gloo")
    return torch.device("cuda", torch.cuda.current_device())


class ShardedColumns(Columns):
    """Each rank has some of the columns; results that take all of them are the same everywhere.

    Gram matrices of segments are added in the order of segments, as one process would; maxima do
    not depend on order. So is what follows from them, bit for bit.

    Args:
        segment: columns of a segment.
        ranks: who has the others.
    """

    def __init__(self, segment: int, ranks: Ranks) -> None:
        super().__init__(segment)
        self._ranks = ranks

    def _add(self, parts: Iterable[Tensor]) -> Tensor:
        return self._ranks.add_in_order(list(parts))

    def _fold(self, parts: Iterable[Tensor]) -> Tensor:
        packed: list[Tensor] = []
        for part in parts:
            size = len(part)
            i, j = torch.tril_indices(size, size)
            packed.append(part[i, j])
        total = self._add(packed)
        gram = total.new_empty(size, size)
        gram[i, j] = total
        gram[j, i] = total
        return gram

    def join_peaks(self, peaks: Tensor) -> Tensor:
        # Magnitudes order as their bits do; a NaN's are the largest of all.
        bits = self._ranks.largest(peaks.contiguous().view(torch.int32) & _MAGNITUDE)
        return bits.view(torch.float32)

    def join_flags(self, flags: Tensor) -> Tensor:
        return self._ranks.largest(flags.to(torch.int32)) > 0

    def agree(self, results: Sequence[Tensor | None]) -> None:
        self._ranks.agree("the result of the step", list(results))


def digest_of(values: Iterable[object]) -> bytes:
    """32 bytes that are equal for equal values: tensors, numbers, strings and what has them."""
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{list(value.shape)}".encode())
            digest.update(value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, list | tuple):
            digest.update(digest_of(value))
        elif isinstance(value, dict):
            digest.update(digest_of(sorted(value.items())))
        elif callable(value):  # its address would differ
            digest.update(type(value).__qualname__.encode())
        else:
            digest.update(repr(value).encode())
        digest.update(b"\0")
    return digest.digest()
