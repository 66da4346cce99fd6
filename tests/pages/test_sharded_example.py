# SPDX-License-Identifier: Apache-2.0
"""examples/sharded, launched as its first lines say, stopped, and resumed with other ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fastagg
from tests.scripts import HANG

ROOT = Path(__file__).resolve().parents[2]


# The variables that torchrun sets for a single process; port 0: any free port.
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def run(folder: Path, rounds: int, ranks: int = 1) -> str:
    """Return the output of the example.

    One rank runs without torchrun, which would import torch a second time.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = [str(ROOT / "examples" / "sharded" / "server.py"), str(folder)]
    source = str(Path(fastagg.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, *(launch if ranks > 1 else []), *script, f"--rounds={rounds}"],
        env={**os.environ, **ONE_RANK, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_resumes_where_it_stopped(tmp_path: Path) -> None:
    assert "round 4: active" in run(tmp_path / "once", 4)
    run(tmp_path / "twice", 2, ranks=2)
    said = run(tmp_path / "twice", 4)
    assert "round 3: active" in said and "round 2: active" not in said
    once, twice = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice"))
    assert once.keys() == twice.keys() == {"weight", "bias"}
    for name in once:
        assert torch.equal(once[name], twice[name])
        assert once[name].abs().max() > 0.1


@pytest.mark.slow
def test_without_torchrun_one_line_names_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "sharded" / "server.py"), str(tmp_path)],
        env={k: v for k, v in os.environ.items() if k not in ONE_RANK},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 2
    assert "launch it with torchrun: torchrun --nproc" in done.stderr.splitlines()[-1]
