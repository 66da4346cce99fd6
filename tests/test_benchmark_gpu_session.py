# SPDX-License-Identifier: Apache-2.0
"""A rehearsal of benchmarks/gpu_session.sh without a GPU, on an image of a bare machine.

The image is a folder: Python with torch and an old setuptools, pytest without plugins in another
place that PYTHONPATH names, a wrapper of nvcc far from the toolkit, no make, no hypothesis, and
(where the kernel permits it) no network.
"""

from __future__ import annotations

import ensurepip
import importlib.metadata as metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from tests.cuda.test_gpu_benchmark import check_every_op

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks/gpu_session.sh"
STAGES = [
    "GPU", "build", "self-check", "Gram entries", "GPU tests", "benchmarks", "memcheck",
    "racecheck", "NCCL", "other tests",
]  # fmt: skip
TOOLS = [
    "bash", "cat", "cp", "cut", "date", "dirname", "env", "grep", "head", "ln", "ls", "mkdir",
    "nproc", "rm", "sed", "sh", "sleep", "tail", "tee", "timeout", "touch", "wc",
]  # fmt: skip

# Start the loopback interface of a new network namespace, then run a command.
LOOPBACK = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", 1))
os.execvp(sys.argv[1], sys.argv[1:])
"""


def closure(names: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Return the installed distributions with these names, and those that they require."""
    found: dict[str, metadata.Distribution] = {}
    todo = list(names)
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        for line in found[name].requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                todo.append(needed.name)
    return found


def link_packages(names: Iterable[str], folder: Path, without: Iterable[str] = ()) -> None:
    """Fill a folder with links to installed packages and to what they require."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, distribution in closure(names).items():
        if name in without:
            continue
        tops = {file.parts[0] for file in distribution.files or []}
        for top in tops - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def old_setuptools(folder: Path) -> bool:
    """Unpack the setuptools that Python brings, if it is older than 77."""
    wheels = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("setuptools-*.whl"))
    if not wheels or int(wheels[0].name.split("-")[1].split(".")[0]) >= 77:
        return False
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(folder)
    return True


@dataclass
class Machine:
    """The image, and the runs of the script in it."""

    home: Path

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        folders = [self.home / name for name in ("wrappers", "tools", "python/bin")]
        environment = {
            "PATH": os.pathsep.join(map(str, folders)),
            "HOME": str(self.home),
            "PYTHONPATH": str(self.home / "carried"),
            **variables,
        }
        command = [str(self.home / "checkout/benchmarks/gpu_session.sh"), *arguments]
        return subprocess.run(
            [*without_network(), *command], env=environment, capture_output=True, text=True
        )


def without_network() -> list[str]:
    """Return a command that runs another one without a network; empty if that is not permitted."""
    unshare = shutil.which("unshare")
    if not unshare:
        return []
    prefix = [unshare, "-rn", sys.executable, "-c", LOOPBACK]
    works = subprocess.run([*prefix, shutil.which("true") or "true"], capture_output=True)
    return prefix if works.returncode == 0 else []


@pytest.fixture(name="machine", scope="module")
def _machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    home = tmp_path_factory.mktemp("bare")
    checkout = home / "checkout"
    for name in ("benchmarks", "csrc", "fastagg", "python", "tests"):
        ignore = shutil.ignore_patterns("__pycache__", "pages")
        shutil.copytree(ROOT / name, checkout / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    (home / "tools").mkdir()
    for name in TOOLS:
        (home / "tools" / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name}"))
    venv.create(home / "python", symlinks=True, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(home / "python")}))
    shutil.rmtree(packages)
    packages.mkdir()
    old = old_setuptools(packages)
    link_packages(
        ["torch", "numpy", "safetensors"] + ([] if old else ["setuptools"]),
        packages,
        without=["setuptools"] if old else [],
    )
    link_packages(["pytest"], home / "carried")
    toolkit = home / "toolkit-13"
    program(
        toolkit / "bin/nvcc",
        f'#!/bin/sh\necho "nvcc of a rehearsal"\necho "#$ TOP={toolkit}/bin/.." >&2\n',
    )
    program(home / "wrappers/nvcc", f'#!/bin/sh\nexec {toolkit}/bin/nvcc "$@"\n')
    (toolkit / "lib").mkdir()
    (toolkit / "lib/libcudart.so.13").touch()
    return Machine(home)


def outcomes(summary: str) -> dict[str, str]:
    """Return the outcome of each stage, in the order of the summary."""
    lines = [line.partition(": ") for line in summary.splitlines()]
    return {name: outcome for name, _, outcome in lines if name in STAGES}


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_without_cuda_it_says_so_and_stops(machine: Machine, tmp_path: Path) -> None:
    result = machine.run(str(tmp_path))
    assert result.returncode == 1
    summary = (tmp_path / "summary.txt").read_text()
    assert f"GPU: NOT RUN: torch {torch.__version__}: it has no CUDA\nstopped" in summary
    assert summary in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"summary.txt", "build.log"}
    log = (tmp_path / "build.log").read_text()
    assert f"CUDA_HOME {machine.home.resolve()}/toolkit-13, nvcc {machine.home}/wrappers" in log
    assert "nvcc of a rehearsal" in log
    assert f"python:{machine.home}/carried" in log  # the end of PYTHONPATH
    assert "hypothesis MISSING" in log
    assert f"pytest {metadata.version('pytest')}" in log


@pytest.mark.long
@pytest.mark.slow
def test_the_commands_of_all_stages_run(machine: Machine, tmp_path: Path) -> None:
    result = machine.run(str(tmp_path), REHEARSAL="1")
    assert result.returncode == 0, result.stdout + result.stderr
    summary = (tmp_path / "summary.txt").read_text()
    found = outcomes(summary)
    assert list(found) == STAGES
    assert all(outcome.startswith("ok") for outcome in found.values()), summary
    files = list(tmp_path.rglob("*"))
    assert len(files) <= 8 and all(path.stat().st_size < 16 << 20 for path in files)
    check_every_op(tmp_path)
    assert re.search(r"^gram \(20, 300\) .*1\.7 x careful", summary, re.M)
    assert re.search(r"^\d+ targets met, \d+ missed, 0 unknown$", summary, re.M)
    tests = (tmp_path / "tests.log").read_text()
    assert "test_gram_entries.py::" in tests and "without tests/conftest.py" in tests
    assert "gloo-cpu" in tests
    assert "test_emulated" not in tests
    assert (tmp_path / "sanitizers.log").read_text().count("all agree") == 6


def test_the_limits_of_all_stages_add_up_to_less_than_nine_minutes() -> None:
    form = r'stage "([^"]+)" (?:"\$\(at_least )?(\w+)'
    limits = re.findall(form, SCRIPT.read_text())
    assert [name for name, _ in limits] == STAGES
    assert sum(int(limit) for _, limit in limits[:-1]) < 540
    assert limits[-1][1] == "rest"


@pytest.fixture(name="stub")
def _stub(tmp_path: Path) -> Path:
    """A Python that only waits in the GPU tests, and in other stages fails or succeeds at once."""
    path = tmp_path / "python"
    program(
        path,
        """#!/bin/sh
case "$*" in
  *test_gpu.py*) echo "before the wait"; exec sleep 60 ;;
  *test_gram_entries.py*) echo "an entry differs"; exit 1 ;;
esac
""",
    )
    return path


def test_a_stage_ends_at_the_limit_and_keeps_its_output(
    machine: Machine, tmp_path: Path, stub: Path
) -> None:
    out = tmp_path / "out"
    result = machine.run(str(out), "11", PYTHON=str(stub), REHEARSAL="1")
    assert result.returncode == 1
    found = outcomes((out / "summary.txt").read_text())
    assert found["self-check"].startswith("ok")
    assert found["Gram entries"].startswith("FAILED (status 1)")
    assert "an entry differs" in result.stdout
    assert found["GPU tests"].startswith("FAILED, ended after")
    assert "before the wait" in (out / "tests.log").read_text()
    assert found["NCCL"] == "NOT RUN, the total time limit is reached"


def test_a_killed_run_leaves_what_it_has(machine: Machine, tmp_path: Path, stub: Path) -> None:
    out = tmp_path / "out"
    script = str(machine.home / "checkout/benchmarks/gpu_session.sh")
    command = ["timeout", "--signal=KILL", "6", script, str(out)]
    environment = {**os.environ, "PYTHON": str(stub), "REHEARSAL": "1"}
    assert subprocess.run(command, env=environment, capture_output=True).returncode != 0
    assert outcomes((out / "summary.txt").read_text())["Gram entries"].startswith("FAILED")
    assert "before the wait" in (out / "tests.log").read_text()


def test_relative_paths_of_the_caller_work_in_all_stages(machine: Machine, tmp_path: Path) -> None:
    program(tmp_path / "bin/snake", '#!/bin/sh\necho "in $PWD: $PYTHONPATH"\n')
    environment = {**os.environ, "REHEARSAL": "1"}
    environment |= {"PYTHON": "bin/snake", "PYTHONPATH": "wheels:/elsewhere"}
    command = [str(machine.home / "checkout/benchmarks/gpu_session.sh"), "out"]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    carried = f":{tmp_path}/wheels:/elsewhere\n"
    log = (tmp_path / "out/build.log").read_text()
    assert re.search(rf"in .*/build/gpu: .*{carried}", log)


def test_benchmarks_that_are_ended_leave_no_files_half_written(
    machine: Machine, tmp_path: Path
) -> None:
    ends = '*" benchmarks.cuda "*) touch "$out/.cuda.csv" "$out/.cuda.md"; exit 1 ;;'
    program(tmp_path / "python", f'#!/bin/sh\ncase "$*" in\n  {ends}\nesac\n')
    out = tmp_path / "out"
    assert machine.run(str(out), PYTHON=str(tmp_path / "python"), REHEARSAL="1").returncode == 1
    found = outcomes((out / "summary.txt").read_text())
    assert found.pop("benchmarks").startswith("FAILED (status 1)")
    assert all(outcome.startswith("ok") for outcome in found.values())
    logs = {"build.log", "tests.log", "bench.log", "sanitizers.log"}
    assert {path.name for path in out.iterdir()} == {"summary.txt", *logs}


def function(name: str) -> str:
    """Return a function of the script."""
    found = re.search(rf"^{name}\(\) {{$.*?^}}$", SCRIPT.read_text(), re.M | re.S)
    assert found
    return found.group()


def test_libcudart_of_a_toolkit_from_pip_gets_a_name_without_version(
    machine: Machine, tmp_path: Path
) -> None:
    script = f"site_packages() {{ echo /nowhere; }}\n{function('runtime_folders')}\nruntime_folders"
    environment = {**os.environ, "CUDA_HOME": str(machine.home / "toolkit-13")}

    def folder() -> Path:
        command = ["bash", "-uc", script]
        return Path(
            subprocess.run(
                command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
            ).stdout.strip()
        )

    link = folder() / "libcudart.so"
    assert link.resolve() == (machine.home / "toolkit-13/lib/libcudart.so.13").resolve()
    complete = tmp_path / "toolkit/lib64"
    complete.mkdir(parents=True)
    (complete / "libcudart.so").touch()
    environment["CUDA_HOME"] = str(tmp_path / "toolkit")
    assert folder() == complete


def test_an_old_setuptools_builds_without_pyproject(
    machine: Machine, tmp_path: Path, compiler: None
) -> None:
    """As the stage "build" does, with an extension of a few lines in place of the sources."""
    packages = tmp_path / "packages"
    if not old_setuptools(packages):
        pytest.skip("Python brings no old setuptools")
    tree = tmp_path / "tree"
    for name in ("csrc/bindings", "fastagg"):
        (tree / name).mkdir(parents=True)
    (tree / "csrc/bindings/bindings.cpp").write_text(
        '#include <Python.h>\nstatic PyModuleDef one = {PyModuleDef_HEAD_INIT, "_C"};\n'
        "PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&one); }\n"
    )
    for name in ("setup.py", "write_stub.py"):
        shutil.copy(ROOT / name, tree)
    environment = {**os.environ, "PYTHONPATH": str(packages), "FASTAGG_CUDA": "0"}

    def setup(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "setup.py", *arguments]
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)

    result = setup("build_ext", "--inplace")
    assert result.returncode == 0, result.stderr
    assert list((tree / "fastagg").glob("_C*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    assert "project.license" in setup("--version").stderr  # why the script leaves it out


def test_make_passes_on_the_packages_of_the_caller() -> None:
    if not shutil.which("make"):
        pytest.skip("there is no make")
    command = ["make", "--dry-run", "gpu-check", "OUT=x", "PYTHON=snake"]
    environment = {**os.environ, "PYTHONPATH": "/carried"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert 'PYTHON="snake" PYTHONPATH="/carried" benchmarks/gpu_session.sh "x"' in result.stdout


def test_failures_are_printed_when_they_happen(tmp_path: Path) -> None:
    (tmp_path / "test_dies.py").write_text(
        "import os\ndef test_fails(): assert 1 == 2\ndef test_dies(): os._exit(7)\n"
    )
    options = ["-v", "-p", "no:cacheprovider", "-p", "benchmarks.report_at_once"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 7
    assert "test_dies.py::test_fails, call" in result.stdout
    assert "assert 1 == 2" in result.stdout
