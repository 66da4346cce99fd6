# SPDX-License-Identifier: Apache-2.0
"""examples/sharded, launched as its first lines say: stopped, and gone on with other ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fastagg

ROOT = Path(__file__).resolve().parents[2]


def torchrun(folder: Path, ranks: int, rounds: int) -> str:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(ROOT / "examples" / "sharded" / "server.py"), str(folder)]
    source = str(Path(fastagg.__file__).parents[1])
    run = subprocess.run(
        [*launch, f"--nproc-per-node={ranks}", *script, f"--rounds={rounds}"],
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_the_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    (tmp_path / "once").mkdir()
    (tmp_path / "twice").mkdir()
    assert "round 4: active" in torchrun(tmp_path / "once", 2, 4)
    torchrun(tmp_path / "twice", 2, 2)
    said = torchrun(tmp_path / "twice", 1, 4)
    assert "round 3: active" in said and "round 2: active" not in said
    once, twice = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice"))
    assert once.keys() == twice.keys() == {"weight", "bias"}
    for name in once:
        assert torch.equal(once[name], twice[name])
        assert once[name].abs().max() > 0.1
