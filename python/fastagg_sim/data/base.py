# SPDX-License-Identifier: Apache-2.0
"""The type of all data sets, and their errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


class DataError(Exception):
    """Something is wrong with a data set."""


class DataNotFoundError(DataError):
    """A data set is not on this machine; the message states what to do."""


class CorruptDataError(DataError):
    """A file is truncated, has another format, or has other contents than the data set."""


@dataclass(frozen=True)
class Dataset:
    """A classification data set in memory.

    train_x, test_x: float32 [n, *in_shape]; images are [n, channels, height, width].
    train_y, test_y: int64 [n], in [0, num_classes).
    clients: the training indices of each client, int64, if the data set is divided among clients;
        else None.
    """

    name: str
    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    num_classes: int
    clients: list[torch.Tensor] | None = None

    @property
    def in_shape(self) -> tuple[int, ...]:
        """The shape of one sample, without the batch dimension."""
        return tuple(self.train_x.shape[1:])
