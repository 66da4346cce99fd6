# SPDX-License-Identifier: Apache-2.0
"""Tensors that no kernel can read are refused by the wrapped and the raw ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastagg import ops

D = 5


def raw_sum(out: Any, rows: list[Any], weights: Any) -> None:
    torch.ops.fastagg.weighted_sum_(out, rows, weights, 1.0, None)


def wrapped_sum(out: Any, rows: list[Any], weights: Any) -> None:
    ops.weighted_sum_(out, rows, weights)


CALLS = pytest.mark.parametrize("call", [raw_sum, wrapped_sum])


def cut(n: int) -> Tensor:
    tensor = torch.ones(n)
    tensor.untyped_storage().resize_(4 * n - 1)
    return tensor


@CALLS
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda n: torch._neg_view(torch.zeros(n)), "lazy negation"),
        (lambda n: torch.zeros(n, dtype=torch.complex64).conj().imag, "contiguous|lazy"),
        (lambda n: torch._efficientzerotensor(n), "contiguous|memory"),
        (cut, "reaches beyond its"),
    ],
)
def test_tensors_without_their_bytes_in_memory(
    call: Callable[..., None], make: Callable[[int], Tensor], said: str
) -> None:
    out, rows, weights = torch.zeros(D), torch.ones(1, D), torch.ones(1)
    with pytest.raises(ValueError, match=said):
        call(make(D), list(rows), weights)
    with pytest.raises(ValueError, match=said):
        call(out, [make(D)], weights)
    assert not out.any()


@CALLS
def test_other_layouts_are_a_type_error_that_names_the_argument(call: Callable[..., None]) -> None:
    out, rows, weights = torch.zeros(D), torch.ones(1, D), torch.ones(1)
    for other in (
        rows[0].to_sparse(),
        rows[0].to_mkldnn(),
    ):
        with pytest.raises(TypeError, match="rows: expected dense tensors"):
            call(out, [other], weights)
        with pytest.raises(TypeError, match="out: expected dense tensors"):
            call(other, list(rows), weights)
    assert not out.any()


def test_a_mixture_with_device_meta_is_refused() -> None:
    out = torch.zeros(D)
    with pytest.raises(ValueError, match="expected all tensors on one device"):
        ops.weighted_sum_(out, torch.ones(2, D), torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="expected all tensors on one device"):
        ops.gram(torch.ones(2, D), pairs=torch.ones(2, 2, dtype=torch.bool, device="meta"))
    ops.weighted_sum_(*(t.to("meta") for t in (out, torch.ones(2, D), torch.ones(2))))


def test_numbers_that_no_call_could_finish_are_refused() -> None:
    gram, ones = torch.eye(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="iterations: expected 0 to 100000"):
        torch.ops.fastagg.weiszfeld(gram, ones, ones, 1.0, 2**62)
    with pytest.raises(ValueError, match="iterations: expected 0 to 100000"):
        ops.clip_towards(gram, ones[:3], 1.0, 2**62)
    with pytest.raises(ValueError, match="rows: expected at most 16777216 rows"):
        ops.abs_max(torch.ones(1).expand(2**40, 1))
    for size in (2**63 - 1, 2**62, 4):
        whole = torch.ops.fastagg.bucketed_gram(gram, torch.arange(4), ones, size)
        assert whole[0].shape == (1, 1)
    assert ops.bucketed_gram(gram, torch.arange(4), ones, 2**70)[1].tolist() == [0] * 4
