# SPDX-License-Identifier: Apache-2.0
"""The models that clients sent in a round, and their updates: weights minus the global model.

A rule that reads updates once reads the bytes that the framework has received, and nothing that is
as large as the updates is written. For other rules updates are written into rows, by all threads;
rules with a memory take ownership of such rows.

Models are kept by sender: which client a sender is shows only when all models were checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from fastagg.integrations._wire import Received, Values, WireLayout
from fastagg.ops.memory import tensor_of
from fastagg.updates.differences import Differences
from fastagg.updates.row_pool import RowPool

_SMALL = 1 << 18  # numbers of a round that one thread subtracts as fast as several


class ReceivedModels:
    """The models of the senders of one round.

    Args:
        layout: of the model.
        params: [d] float32, contiguous: the model that the clients started from.
    """

    def __init__(self, layout: WireLayout, params: Tensor) -> None:
        self._layout, self._params = layout, params
        self._values: dict[str, Sequence[Values]] = {}  # of :meth:`WireLayout.values`
        self._differences: set[str] = set()  # senders of updates

    def add(self, sender: str, arrays: Received, is_update: bool = False) -> None:
        """Check the model of a sender, or its update, and keep a reference to its bytes.

        Args:
            sender: its name.
            arrays: what it sent.
            is_update: whether that is an update.

        Raises:
            WireError: names, shapes, dtypes or lengths differ from those of the layout.
        """
        self._values[sender] = self._layout.values(arrays)
        if is_update:
            self._differences.add(sender)

    def add_row(self, sender: str, row: Tensor) -> None:
        """Add the update of a sender, [d] float32, contiguous, which has waited for this round."""
        self._values[sender] = self._layout.split(row)
        self._differences.add(sender)

    def streams(self, senders: Sequence[str]) -> Differences:
        """Return the updates of ``senders``, which are subtracted while they are read."""
        models = [[_tensor(part) for part in self._values[sender]] for sender in senders]
        bases = [self._base(sender) for sender in senders]
        if any(base is not self._params for base in bases):
            zeros = torch.zeros_like(self._params)
            return Differences(models, [zeros if base is None else base for base in bases])
        return Differences(models, self._params)

    def write(self, pool: RowPool, senders: Mapping[int, str]) -> None:
        """Write the updates of senders into the rows of a pool, by all threads.

        Args:
            pool: the rows.
            senders: dict from clients, whose rows are written, to senders.
        """
        jobs = [(self._values[s], self._base(s), pool.row(k)) for k, s in senders.items()]
        workers = min(torch.get_num_threads(), len(jobs))
        if workers < 2 or len(jobs) * self._layout.num_params < _SMALL:
            for job in jobs:
                self._subtract(job)
        else:  # NumPy releases the lock of the interpreter
            with ThreadPoolExecutor(workers) as threads:
                list(threads.map(self._subtract, jobs))

    def _base(self, sender: str) -> Tensor | None:
        """Return what is subtracted from what a sender sent; None: nothing, it is an update."""
        return None if sender in self._differences else self._params

    def _subtract(self, job: tuple[Sequence[Values], Tensor | None, Tensor]) -> None:
        values, base, row = job
        self._layout.subtract_values(values, base, row)


def _tensor(values: Values) -> Tensor:
    """Return the numbers of an array, flat, as a tensor that must not be written; copies nothing.

    Only arrays with strides, in Fortran's order, at odd addresses, or of another byte order are
    copied.
    """
    if isinstance(values, Tensor):
        return values.view(-1)
    flat = np.ascontiguousarray(values).reshape(-1)
    if not (flat.flags.aligned and flat.dtype.isnative):
        flat = flat.astype(flat.dtype.newbyteorder("="))
    return tensor_of(flat, writable=False)
