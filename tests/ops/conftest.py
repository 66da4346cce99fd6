# SPDX-License-Identifier: Apache-2.0
"""The op tests run on every instruction set of this processor, and on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastagg import _C, ops

ISAS = ("portable", "avx2", "avx512", "cuda")


class OnCuda:
    """Stands in for :mod:`fastagg.ops`: arguments go to the GPU, and what changed comes back.

    Strides are kept. Client ids (int64, 1-D) stay on the CPU, where they are checked.
    """

    arithmetic = "cuda"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            moved = _Moved()
            result = op(*map(moved, args), **{k: moved(v) for k, v in kwargs.items()})
            if name.endswith("_"):
                moved.copy_back()
                return args[0]
            return result.cpu()

        return call


class _Moved:
    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []  # here, there

    def __call__(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self(item) for item in value]
        if not isinstance(value, Tensor) or (value.dtype == torch.int64 and value.dim() == 1):
            return value
        there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        there.copy_(value)
        self.pairs.append((value, there))
        return there

    def copy_back(self) -> None:
        for here, there in self.pairs:
            here.copy_(there)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What the ops of the test's module are computed with."""
    if request.param == "cuda":
        if "cuda" not in ops.devices():
            pytest.skip("no CUDA kernels in this build, or no GPU")
        monkeypatch.setattr(request.module, "ops", OnCuda())
        yield "cuda"
        return
    before = _C.isa()
    try:
        _C.set_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    _C.set_isa(before)
