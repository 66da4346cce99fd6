# SPDX-License-Identifier: Apache-2.0
"""The op tests run on every instruction set of this processor, and on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastagg import _C, build_info, ops
from fastagg.ops.selfcheck import OnDevice

ISAS = ("portable", "avx2", "avx512", "cuda")


class Emulated:
    """The ops of a build with tests/cuda/emulator: the CUDA kernels, for tensors on the CPU."""

    device = "cuda"

    def __getattr__(self, name: str) -> Any:
        return getattr(ops, name)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What the ops of the test's module are computed with."""
    if request.param == "cuda" and build_info()["torch"] == "emulated":
        monkeypatch.setattr(request.module, "ops", Emulated())
        yield "cuda"
        return
    if request.param == "cuda":
        if "cuda" not in ops.devices():
            pytest.skip("no CUDA kernels in this build, or no GPU")
        monkeypatch.setattr(request.module, "ops", OnDevice("cuda"))
        yield "cuda"
        return
    before = _C.isa()
    try:
        _C.set_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    _C.set_isa(before)
