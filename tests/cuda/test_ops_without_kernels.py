# SPDX-License-Identifier: Apache-2.0
"""Every op has a CUDA kernel, or docs/cuda.md says what it does on a GPU and why."""

from __future__ import annotations

import re
from pathlib import Path

from fastagg.ops._dispatch import TABLE

ROOT = Path(__file__).resolve().parents[2]


def test_ops_without_a_kernel_are_documented() -> None:
    table = (ROOT / "csrc/bindings/op_table.h").read_text(encoding="utf-8")
    found = re.findall(r"FASTAGG_OP\((\w+),\s*(yes|no),\s*(yes|no),\s*(yes|no),", table)
    assert {name for name, *_ in found} == set(TABLE)
    without = {name for name, _, cuda, _ in found if cuda == "no"}
    assert all(anywhere == "yes" for name, _, _, anywhere in found if name in without)
    page = (ROOT / "docs/cuda.md").read_text(encoding="utf-8")
    section = page.split("## Ops without a kernel\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(without)


def test_every_op_is_tested_on_a_gpu() -> None:
    """The self-check runs all ops; gpu-check has it, and runs it under the sanitizers."""
    session = (ROOT / "benchmarks/gpu_session.sh").read_text(encoding="utf-8")
    assert re.search(r'stage "self-check" \d+ tests.log "\$python" -m fastagg\n', session)
    sanitized = (ROOT / "benchmarks/gpu_sanitized.py").read_text(encoding="utf-8")
    assert "selfcheck.run(K, S, d, device=device)" in sanitized
