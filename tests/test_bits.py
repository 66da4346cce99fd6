# SPDX-License-Identifier: Apache-2.0
"""Packed sets of pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastagg.ops import bits


def test_by_hand() -> None:
    flags = torch.tensor([[1, 0, 1, 0, 0, 0, 0, 0, 0, 1], [0] * 10], dtype=torch.bool)
    packed = bits.pack(flags)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [[5, 2], [0, 0]]
    assert torch.equal(bits.unpack(packed, 10), flags)


@given(seed=st.integers(0, 2**31), rows=st.integers(1, 5), size=st.integers(1, 40))
def test_round_trip(seed: int, rows: int, size: int) -> None:
    g = torch.Generator().manual_seed(seed)
    flags = torch.rand(rows, size, generator=g) < 0.5
    packed = bits.pack(flags)
    assert packed.shape == (rows, bits.packed_bytes(size)) == (rows, (size + 7) // 8)
    assert torch.equal(bits.unpack(packed, size), flags)
    some, others = torch.randperm(rows, generator=g), torch.randperm(size, generator=g)[:7]
    assert torch.equal(bits.pick(packed, some, others), flags[some][:, others])
    assert torch.equal(bits.ones(rows, size), bits.pack(torch.ones(rows, size, dtype=torch.bool)))


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"flags: expected dtype bool, got torch\.float32"):
        bits.pack(torch.tensor([[0.5, 2.0]]))
    with pytest.raises(ValueError, match="bits: expected 3 bytes in a row, for 20 flags, got 1"):
        bits.unpack(torch.zeros(3, 1, dtype=torch.uint8), 20)
