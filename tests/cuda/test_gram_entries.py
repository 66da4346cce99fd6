# SPDX-License-Identifier: Apache-2.0
"""An entry of a Gram matrix depends on its two rows alone, on every device.

On a GPU this tests the one assumption about hardware that the kernels make: the sum inside an `mma`
does not depend on which operand is A and which is B. `benchmarks/gpu_session.sh` runs it first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastagg import ops


@pytest.mark.parametrize("device", ops.devices())
@pytest.mark.parametrize("precision", ["highest", "high", "tf32"])
@pytest.mark.parametrize("d", [1, 7, 513, 9_000])
def test_gram_entries_depend_on_their_two_rows_alone(d: int, precision: str, device: str) -> None:
    def entries(updates: Tensor, **options: Any) -> Tensor:
        return ops.gram(updates, dtype=torch.float64, precision=precision, **options)

    rows = torch.randn(300, d, device=device)
    full = entries(rows)
    assert torch.equal(full, full.T)
    order = torch.randperm(300, device=device)
    assert torch.equal(entries(rows[order]), full[order][:, order])
    for count in (1, 16, 17, 64, 65, 129):  # on a GPU: either kernel, any part of a tile
        some = order[:count]
        assert torch.equal(entries(rows[some]), full[some][:, some])
    group = torch.arange(300, device=device) // 50
    pairs = group[:, None] == group
    assert torch.equal(entries(rows, pairs=pairs), torch.where(pairs, full, 0.0))
