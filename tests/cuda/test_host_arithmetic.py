# SPDX-License-Identifier: Apache-2.0
"""The index and reduction arithmetic of the CUDA kernels, on machines without a GPU."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # compiles a program

ROOT = Path(__file__).resolve().parents[2]
CHECKS = [
    "triangle",
    "partitions",
    "plans",
    "slots",
    "few_rows",
    "more_rows",
    "entries_depend_on_their_rows_alone",
    "cosines",
    "row_blocks",
    "split_trees",
    "shares",
    "scale_blocks",
    "widths",
    "ranking",
    "scores",
    "sketches",
    "similar_tiles",
    "sorted_columns",
    "sorted_lists",
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler ({compiler[0]})")
    path = tmp_path_factory.mktemp("host") / "checks"
    source = Path(__file__).with_name("host_checks.cpp")
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc/kernels/cuda'}"]
    subprocess.run([*compiler, *flags, str(source), "-o", str(path)], check=True)
    return path


@pytest.mark.parametrize("check", CHECKS)
def test_host_arithmetic(program: Path, check: str) -> None:
    done = subprocess.run([program, check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_check_is_run(program: Path) -> None:
    listing = subprocess.run([program], capture_output=True, text=True, check=True)
    assert sorted(CHECKS) == listing.stdout.split()
