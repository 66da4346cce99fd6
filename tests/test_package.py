# SPDX-License-Identifier: Apache-2.0
"""The package for its users: import, build information, self-check, build."""

from __future__ import annotations

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fastagg
from fastagg import _C
from fastagg.ops import selfcheck
from fastagg.ops._dispatch import TABLE
from fastagg.ops._examples import ExampleData

ROOT = Path(__file__).resolve().parents[1]


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        cwd=ROOT,
        check=False,
    )


@pytest.mark.slow
def test_without_the_extension_the_error_says_what_to_run() -> None:
    result = python("-c", "import sys; sys.modules['fastagg._C'] = None; import fastagg")
    assert result.returncode == 1
    assert "ImportError: fastagg's compiled extension" in result.stderr
    assert "make build" in result.stderr


def test_dir_shows_public_names_only() -> None:
    shown = {name for name in dir(fastagg) if not name.startswith("__")}
    assert shown == {*fastagg.__all__, "distributed", "integrations", "privacy", "robust"}
    assert all(getattr(fastagg, name) is not None for name in shown)


@pytest.mark.slow
def test_submodules_are_imported_at_first_use() -> None:
    script = (
        "import sys, fastagg\n"
        "lazy = ['robust', 'distributed', 'integrations', 'privacy']\n"
        "assert not {f'fastagg.{name}' for name in lazy} & set(sys.modules)\n"
        "assert set(lazy) <= set(dir(fastagg))\n"
        "import torch\n"
        "assert fastagg.robust.Krum(f=1)(torch.ones(4, 2)).tolist() == [1.0, 1.0]\n"
        "assert fastagg.distributed.__name__ == 'fastagg.distributed'\n"
        "assert fastagg.integrations.__name__ == 'fastagg.integrations'\n"
        "assert fastagg.Server.__module__ == 'fastagg.integrations.server'\n"
        "assert fastagg.privacy.epsilon([], delta=1e-5) == 0.0\n"
        "assert not hasattr(fastagg, 'robusts')\n"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_main_describes_the_build_and_checks_it() -> None:
    result = python("-m", "fastagg")
    assert result.returncode == 0, result.stdout + result.stderr
    for word in ("fastagg", "torch", "compiler", "instructions", "CUDA kernels"):
        assert word in result.stdout
    count = len(TABLE)
    assert f"{count} of {count} ops agree" in result.stdout


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--device", 2), ("cuda", 2)])
def test_main_checks_nothing_when_it_is_given_arguments(
    argument: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_module("fastagg.__main__", run_name="not main")["main"]
    with pytest.raises(SystemExit) as stopped:
        main([argument])
    assert stopped.value.code == code
    assert "self-check" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("threads", "library", "variable", "advised"),
    [
        (2, "libgomp-98b21ff3.so.1", None, True),
        (2, "libgomp-98b21ff3.so.1", "GOMP_SPINCOUNT=1000", False),
        (2, "libgomp-98b21ff3.so.1", "GOMP_SPINCOUNT=infinite", True),
        (2, "libgomp-98b21ff3.so.1", "OMP_WAIT_POLICY=PASSIVE", False),
        (2, "libgomp-98b21ff3.so.1", "OMP_WAIT_POLICY=active", True),
        (2, "libomp.so", None, False),
        (1, "libgomp-98b21ff3.so.1", None, False),
        (2, None, None, False),  # no such file
    ],
)
def test_main_advises_against_threads_that_spin(
    threads: int,
    library: str | None,
    variable: str | None,
    advised: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(*variable.split("="))
    maps = tmp_path / "maps"
    if library:
        maps.write_bytes(b"7f00-7f01 r-xp 00000000 00:00 0 /b\xfcro/" + library.encode())
    # Not imported: tests of the pages run the module as a user does.
    text = runpy.run_module("fastagg.__main__", run_name="not main")["_threads"](maps)
    assert text.startswith(str(threads))
    assert ("GOMP_SPINCOUNT=1000" in text) == advised


def test_selfcheck_notices_a_wrong_op(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fastagg.ops.gram
    monkeypatch.setattr(fastagg.ops, "gram", lambda *a, **k: right(*a, **k) * (1 + 1e-6))
    failed = [check.op for check in selfcheck.run(d=5_003) if not check.passed]
    assert failed == ["gram"]


def test_selfcheck_notices_a_wrong_result_in_a_keyword_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = fastagg.ops.memory_total_

    def wrong(*arguments: Any, **options: Any) -> Any:
        result = right(*arguments, **options)
        if "faded" in options:
            options["faded"] *= 1 + 1e-6
        return result

    monkeypatch.setattr(fastagg.ops, "memory_total_", wrong)
    failed = [check.op for check in selfcheck.run(d=300) if not check.passed]
    assert failed == ["memory_total_"]


@pytest.mark.parametrize("how", ["NaN", "shape", "dtype"])
def test_selfcheck_notices_what_has_no_error(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    right = fastagg.ops.abs_max
    wrong = {
        "NaN": lambda *a: right(*a) * math.nan,
        "shape": lambda *a: right(*a)[None],
        "dtype": lambda *a: right(*a).double(),
    }
    monkeypatch.setattr(fastagg.ops, "abs_max", wrong[how])
    failed = [check.op for check in selfcheck.run(d=300) if not check.passed]
    assert failed == ["abs_max"]


def test_selfcheck_covers_every_op() -> None:
    assert {check.op for check in selfcheck.run(d=300)} == set(fastagg.ops.__all__) - {"Rows"}


@pytest.mark.parametrize("name", sorted(TABLE))
def test_ops_on_a_device_return_and_change_what_the_ops_do(name: str) -> None:
    """Use `OnDevice` with the CPU as the device: results come back in the same form."""
    data = ExampleData.random(K=7, S=4, d=33)
    there = selfcheck._outcome(TABLE[name], selfcheck.OnDevice("cpu"), data)
    here = selfcheck._outcome(TABLE[name], fastagg.ops, data)
    assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


def test_arguments_that_overlap_do_so_on_a_device() -> None:
    rows = torch.ones(4, 5)
    with pytest.raises(ValueError, match="shares memory with out"):
        selfcheck.OnDevice("cpu").trimmed_mean_(rows[0], torch.zeros(1), rows, 1)


@pytest.mark.slow
def test_a_report_that_nobody_reads_is_no_traceback() -> None:
    """As with `| head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "fastagg"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.slow
def test_build_info_and_instruction_set() -> None:
    info = fastagg.build_info()
    assert info["isa"] in ("portable", "avx2", "avx512", "neon")
    lowest = "neon" if info["isa"] == "neon" else "portable"
    lowered = python("-c", "import fastagg; print(fastagg.build_info()['isa'])", FASTAGG_ISA=lowest)
    assert lowered.stdout.strip() == lowest
    wrong = python("-c", "import fastagg", FASTAGG_ISA="sse9")
    assert (
        "ValueError: FASTAGG_ISA=sse9: isa: expected portable, avx2, avx512 or neon" in wrong.stderr
    )
    with pytest.raises(ValueError, match="expected portable, avx2, avx512 or neon"):
        _C.set_isa("sse9")


@pytest.mark.parametrize(
    ("wish", "message"),
    [("1", "FASTAGG_CUDA=1, but there is no"), ("yes", "expected auto, 0 or 1")],
)
def test_impossible_builds_fail_loudly(
    wish: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTAGG_CUDA", wish)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    with pytest.raises(SystemExit, match=message):
        runpy.run_path(str(ROOT / "setup.py"))


def test_public_properties_have_a_docstring() -> None:
    lacking = {
        f"{type_.__name__}.{name}"
        for type_ in map(vars(fastagg).get, fastagg.__all__)
        if isinstance(type_, type)
        for name in dir(type_)
        if not name.startswith("_")
        and isinstance(value := getattr(type_, name, None), property)
        and not value.__doc__
    }
    assert not lacking
