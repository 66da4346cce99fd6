# SPDX-License-Identifier: Apache-2.0
"""Communication of ranks: sums in the order of ranks, maxima, and agreement.

Ranks send only tensors of known sizes; nothing is pickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fastagg.updates.columns import Columns

_DIGEST = 32  # bytes of a SHA-256 digest
_TEXT = 479  # bytes of an error's text: with status and digest, a message has 512 bytes
_MAGNITUDE = 0x7FFFFFFF  # all bits of a float32 but its sign


class RankError(RuntimeError):
    """Another rank failed, is gone, or made a different call.

    Parameters and state of this rank are as before the call. If a rank is gone, the process group
    can no longer be used: end all processes and start them again from the last checkpoint.
    """


class Ranks:
    """The collective operations of one process group. All ranks must call them in the same order.

    Args:
        group: ``torch.distributed`` process group; None is the default group.

    Attributes:
        rank: rank of this process in the group.
        size: number of ranks in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed is not initialised: launch with torchrun and call "
                "torch.distributed.init_process_group first"
            )
        # Keep None instead of the default group: a reference to it would keep the group alive after
        # destroy_process_group, and gloo's threads abort if they run when the interpreter ends.
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._device = message_device(dist.get_backend_config(group))

    @contextmanager
    def _talk(self, what: str) -> Iterator[None]:
        """Turn errors of communication into a :class:`RankError`; ``what`` is for its message."""
        try:
            yield
        except RuntimeError as error:  # torch has no narrower class for errors of gloo
            raise RankError(
                f"rank {self.rank} of {self.size} got no answer in {what}: another rank is gone, "
                f"has failed or exceeds the timeout ({error}). Parameters and state are as before; "
                "start all ranks again from the last checkpoint"
            ) from error

    def add_in_order(self, parts: list[Tensor]) -> Tensor:
        """Compute ((p_0 + p_1) + p_2) + ... over the parts of rank 0, then of rank 1, and so on.

        The order of additions is fixed, so the bits do not depend on how parts are spread over
        ranks.

        Args:
            parts: at least one part of this rank, all [n] float64.

        Returns:
            [n] float64, the same on all ranks.
        """
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
        """Return the elementwise maximum over ranks, [n] int32."""
        self.agree("a maximum")
        wire = values.to(self._device, copy=True)
        with self._talk("a maximum"):
            dist.all_reduce(wire, dist.ReduceOp.MAX, group=self.group)
        return wire.to(values.device)

    def agree(self, what: str, same: object = None, error: Exception | None = None) -> None:
        """Return only if no rank has failed and all ranks make the same call.

        Every collective operation begins with this call. So a rank that has failed can call it with
        its error, whatever operation the other ranks are about to begin, and is heard.

        Args:
            what: name of the operation, for messages; must be equal on all ranks.
            same: values that must also be equal on all ranks, as :func:`digest_of` takes them.
            error: the error of this rank; raised here after the other ranks know of it.

        Raises:
            RankError: another rank has failed, or its ``what`` or ``same`` differ.
        """
        digest = digest_of([what, same])
        text = "" if error is None else f"{type(error).__name__}: {error}"
        said = text.encode(errors="backslashreplace")  # names of files may have lone surrogates
        message = bytes([error is not None]) + digest + said[:_TEXT].ljust(_TEXT, b"\0")
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
                f"{self.rank}; every rank must make the same call with equal arguments, and have "
                "the same libraries and instruction sets (FASTAGG_ISA, ATEN_CPU_CAPABILITY)"
            )

    @contextmanager
    def failing_together(self, what: str) -> Iterator[None]:
        """Tell the other ranks of an error within this context, so that all ranks raise."""
        try:
            yield
        except RankError:  # the other ranks know already
            raise
        except Exception as error:
            self.agree(what, error=error)
            raise

    @contextmanager
    def succeeding_together(self, what: str) -> Iterator[None]:
        """Like :meth:`failing_together`, but also wait until all ranks have succeeded.

        For work that does not end with a collective operation.
        """
        with self.failing_together(what):
            yield
        self.agree(what)

    def share(self, value: int) -> int:
        """Return rank 0's value, in [0, 2^62), on all ranks."""
        self.agree("a broadcast")
        wire = torch.tensor([value], dtype=torch.int64, device=self._device)
        with self._talk("a broadcast"):
            dist.broadcast(wire, self._global(0), group=self.group)
        return int(wire)

    def gather_columns(self, own: Tensor, bounds: list[tuple[int, int]]) -> Tensor:
        """Assemble [..., d] from every rank's columns [..., n], on all ranks.

        Args:
            own: columns of this rank.
            bounds: columns (begin, end) of every rank.
        """
        with self.failing_together("gathering columns"):
            whole = own.new_empty(*own.shape[:-1], bounds[-1][1])
        self.agree("gathering columns", [own.shape[:-1], own.dtype])
        with self._talk("gathering columns"):
            for rank, (begin, end) in enumerate(bounds):
                part = own.new_empty(*own.shape[:-1], end - begin)
                part = (own.contiguous() if rank == self.rank else part).to(self._device)
                dist.broadcast(part, self._global(rank), group=self.group)
                whole[..., begin:end] = part.to(own.device)
        return whole

    def _global(self, rank: int) -> int:
        """Return the rank in the default group, which the functions of torch expect."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def message_device(backends: str) -> torch.device:
    """Return the device of messages: the CPU if the group has gloo, otherwise a GPU, for NCCL.

    The device of the aggregator does not matter: messages are small and computed on the CPU by
    policies. So NCCL is used only if the group has nothing else.

    Args:
        backends: from ``torch.distributed.get_backend_config``, such as ``"cpu:gloo,cuda:nccl"``.

    Raises:
        ValueError: the group has neither gloo for the CPU nor NCCL for GPUs.
        RuntimeError: the group has only NCCL, and this process sees no GPU.
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
    """The columns of this rank; results over all columns are combined with those of other ranks.

    Gram matrices of segments are added in the order of segments, as in one process, and maxima do
    not depend on order. So these results are bit-identical on all ranks and to those of one
    process.

    Args:
        segment: columns of a segment.
        first: number of this rank's first column.
        ranks: the ranks over which the columns are spread.
    """

    whole = False

    def __init__(self, segment: int, first: int, ranks: Ranks) -> None:
        super().__init__(segment)
        self.first, self._ranks = first, ranks

    def _add(self, parts: Iterable[Tensor]) -> Tensor:
        return self._ranks.add_in_order(list(parts))

    def _fold(self, parts: Iterable[Tensor]) -> Tensor:
        packed: list[Tensor] = []
        for part in parts:
            size = len(part)
            i, j = torch.tril_indices(size, size, device="cpu")
            packed.append(part[i, j])
        total = self._add(packed)
        gram = total.new_empty(size, size)
        gram[i, j] = total
        gram[j, i] = total
        return gram

    def join_peaks(self, peaks: Tensor) -> Tensor:
        # As integers, the bits of magnitudes are in the same order; those of NaN are the largest.
        bits = self._ranks.largest(peaks.contiguous().view(torch.int32) & _MAGNITUDE)
        return bits.view(torch.float32)

    def join_flags(self, flags: Tensor) -> Tensor:
        return self._ranks.largest(flags.to(torch.int32)) > 0

    def agree(self, results: Sequence[Tensor | None]) -> None:
        self._ranks.agree("the result of the step", list(results))


def digest_of(values: Iterable[object]) -> bytes:
    """Return 32 bytes that are equal for equal values.

    Values may be tensors, arrays, numbers, strings, and lists, tuples and dicts of these. Of a
    callable only the name of its class counts, because its address differs between processes.
    """
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{list(value.shape)}".encode())
            own = value.cpu().clone(memory_format=torch.contiguous_format)  # also strides of size 1
            digest.update(own.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, list | tuple):
            digest.update(digest_of(value))
        elif isinstance(value, dict):
            digest.update(digest_of(sorted(value.items())))
        elif callable(value):
            digest.update(type(value).__qualname__.encode())
        else:
            if hasattr(value, "__array__"):  # its repr may leave numbers out
                array = np.asarray(value)
                value = (array.dtype.str, array.shape, array.tolist())
            digest.update(repr(value).encode(errors="backslashreplace"))
        digest.update(b"\0")
    return digest.digest()
