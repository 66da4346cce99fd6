# SPDX-License-Identifier: Apache-2.0
"""Run the code of the CUDA kernels and their bindings on the CPU (tests/cuda/emulator)."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT / "tests/cuda/emulator"


def _build() -> ModuleType:
    if shutil.which(shlex.split(os.environ.get("CXX", "c++"))[0]) is None:
        pytest.skip("no C++ compiler")
    spec = importlib.util.spec_from_file_location("emulator_build", EMULATOR / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _once(
    factory: pytest.TempPathFactory, name: str, build: Callable[[ModuleType, Path], object]
) -> Path:
    """Return the folder ``name``, in which one process has run ``build(module, folder)``."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # one for all workers
    folder, built = root / name, root / f"{name}.built"
    with FileLock(root / f"{name}.lock"):
        if not built.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            build(_build(), folder)
            built.touch()
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _once(tmp_path_factory, "emulated", lambda module, path: module.build(path))


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = _once(tmp_path_factory, "faults", lambda module, path: module.build_faults(path))
    return folder / "faults"


# A process for several checks, since each one takes two seconds to start.
@pytest.mark.parametrize("core", ["sm_90", "sm_80"])
def test_on_either_tensor_core(folder: Path, core: str) -> None:
    run(folder, "every_op entries_depend_on_their_rows_alone precisions tf32", core)


@pytest.mark.parametrize(
    "checks",
    [
        "accuracy any_alignment groups_of_chunks committed_bits",
        "segments small_shared_memory in_any_order rows_out_of_range",
        "rounds_in_two_halves second_sums short_rows called_off wrong_ids",
    ],
)
def test_emulated(folder: Path, checks: str) -> None:
    run(folder, checks)


def test_the_op_tests_pass(folder: Path) -> None:
    """Runs the op tests that take less than about a second; `make emulate` runs all."""
    slow = ["thread", "300003", "600001", "62006", "40000", "101-610", "530", "2047", "4100"]
    slow += ["30011", "masked", "255", "264", "iterations", "scaling", "70-900"]
    slow += ["200001", "8193", "past_the_caches", "mean_and_variance", "error_of_cosines"]
    slow += ["False-101", "True-101", "False-31]", "True-31]", "40001", "150007"]
    chosen = " and not ".join(["cuda", "test_registration", *slow])
    tests = [str(ROOT / "tests/ops"), "-o", f"pythonpath={folder}", "-k", chosen]
    pytest_command = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    output = run_python(folder, *pytest_command, *tests, HYPOTHESIS_PROFILE="quick")
    found = re.search(r"(\d+) passed", output)
    assert found and int(found[1]) > 200, output


def test_whole_rounds_pass(folder: Path) -> None:
    tests = [str(ROOT / "tests/rules/test_enqueued.py"), "-o", f"pythonpath={folder}"]
    output = run_python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert re.search(r"\d+ passed", output) and "skipped" not in output, output


def run(folder: Path, checks: str, core: str = "sm_90") -> None:
    program = str(EMULATOR / "checks.py")
    run_python(folder, program, *checks.split(), FASTAGG_EMULATED_TENSOR_CORE=core)


def run_python(folder: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- the emulator finds faults ------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel",
    ["neighbours", "warp_barrier", "two_warps", "blocks_apart", "atomic", "copy", "aligned"],
)
def test_a_kernel_without_a_fault_passes(faults: Path, kernel: str) -> None:
    done = subprocess.run([faults, kernel], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("no_barrier", "that no thread wrote"),
        ("write_after_read", "another thread read since the last barrier (race)"),
        ("no_warp_barrier", "another thread wrote since the last barrier (race)"),
        ("not_announced", "another thread wrote since the last barrier (race)"),
        ("announced_too_early", "another thread"),
        ("blocks_together", "another thread wrote since the last barrier (race)"),
        ("blocks_and_one_thread", "another thread of another block wrote (race)"),
        ("not_atomic", "another thread wrote since the last barrier (race)"),
        ("unwritten", "that no thread wrote"),
        ("copy_not_committed", "before the copy to it has been waited for"),
        ("copy_not_waited", "before the copy to it has been waited for"),
        ("copy_too_far", "which belong to no allocation"),
        ("past_the_end", "which belong to no allocation"),
        ("misaligned", "undefined: a misaligned access"),
        ("part_of_a_block", "deadlock"),
    ],
)
def test_a_fault_is_reported(faults: Path, kernel: str, message: str) -> None:
    done = subprocess.run([faults, kernel], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr, done.stderr
    assert "ran" not in done.stdout
