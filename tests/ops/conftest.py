# SPDX-License-Identifier: Apache-2.0
"""The op tests run on every instruction set of this processor, and on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastagg import _C, build_info, ops
from fastagg.ops.selfcheck import OnDevice

EMULATED = build_info()["torch"] == "emulated"


class Emulated:
    """The ops of a build with tests/cuda/emulator: the CUDA kernels, for tensors on the CPU."""

    device = "cuda"

    def __getattr__(self, name: str) -> Any:
        return getattr(ops, name)


def available() -> list[str]:
    """The instruction sets of this processor, and "cuda" if its kernels can run here."""
    best, found = _C.isa(), []
    for name in ("portable", "avx2", "avx512", "neon"):
        try:
            _C.set_isa(name)
        except ValueError:
            continue
        found.append(name)
    _C.set_isa(best)
    return found + ["cuda"] * (EMULATED or "cuda" in ops.devices())


@pytest.fixture(params=available())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The instruction set, or "cuda", that computes the ops in the tests of a module."""
    if request.param == "cuda":
        monkeypatch.setattr(request.module, "ops", Emulated() if EMULATED else OnDevice("cuda"))
        yield "cuda"
        return
    before = _C.isa()
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa(before)
