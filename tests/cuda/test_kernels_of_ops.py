# SPDX-License-Identifier: Apache-2.0
"""Every op has a CUDA kernel, and gpu-check runs it."""

from __future__ import annotations

import re
from pathlib import Path

from fastagg.ops._dispatch import TABLE

ROOT = Path(__file__).resolve().parents[2]


def test_every_op_has_a_kernel() -> None:
    table = (ROOT / "csrc/bindings/op_table.h").read_text(encoding="utf-8")
    found = re.findall(r"FASTAGG_OP\((\w+),\s*(yes|no),\s*(yes|no),\s*(yes|no),", table)
    assert {name for name, *_ in found} == set(TABLE)
    assert [name for name, _, cuda, _ in found if cuda == "no"] == []


def test_every_op_is_tested_on_a_gpu() -> None:
    """The self-check runs all ops; gpu-check has it, and runs it under the sanitizers."""
    session = (ROOT / "benchmarks/gpu_session.sh").read_text(encoding="utf-8")
    assert re.search(r'stage "self-check" \d+ tests.log "\$python" -m fastagg\n', session)
    sanitized = (ROOT / "benchmarks/gpu_sanitized.py").read_text(encoding="utf-8")
    assert "selfcheck.run(K, S, d, device=device)" in sanitized
