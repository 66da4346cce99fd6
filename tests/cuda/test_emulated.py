# SPDX-License-Identifier: Apache-2.0
"""The code of the CUDA kernels and their bindings, run on the CPU (tests/cuda/emulator)."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EMULATOR = Path(__file__).parent / "emulator"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(shlex.split(os.environ.get("CXX", "c++"))[0]) is None:
        pytest.skip("no C++ compiler")
    spec = importlib.util.spec_from_file_location("emulator_build", EMULATOR / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path_factory.mktemp("emulated")
    module.build(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        "every_op",
        "entries_depend_on_their_rows_alone",
        "any_alignment",
        "rows_out_of_range",
        "rounds_in_two_halves",
        "tf32",
        "short_rows",
        "called_off",
    ],
)
def test_emulated(folder: Path, check: str) -> None:
    command = [sys.executable, str(EMULATOR / "checks.py"), check]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
