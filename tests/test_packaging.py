# SPDX-License-Identifier: Apache-2.0
"""What a package says and has: its torch, sources and links. `make test-packages` installs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from fastagg._extension import check_torch

ROOT = Path(__file__).resolve().parents[1]
MINOR = ".".join(torch.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="there is no setup.py beside the tests"
)


def setup(
    *arguments: str, code: str = "", cwd: Path = ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run setup.py in a checkout, after `code`."""
    script = f"import runpy, sys\n{code}\nsys.argv = {['setup.py', *arguments]}\n"
    script += "runpy.run_path('setup.py', run_name='__main__')\n"
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


WITHOUT_TORCH = "sys.modules['torch'] = None"


@pytest.mark.slow
def test_a_build_without_torch_says_what_to_do() -> None:
    done = setup("bdist_wheel", code=WITHOUT_TORCH)
    assert done.returncode == 1
    assert "pip install torch 'setuptools>=77' ninja" in done.stderr
    assert "pip install --no-build-isolation" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["egg_info", "bdist_wheel"])
def test_windows_is_refused_at_once(command: str) -> None:
    code = f"{WITHOUT_TORCH}\nimport setuptools\nsys.platform = 'win32'"
    done = setup(command, code=code)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("fastagg does not support Windows") and "WSL" in line


@pytest.mark.slow
def test_a_source_distribution_names_no_torch_and_a_build_does(tmp_path: Path) -> None:
    for commands, code in ((["sdist"], ""), (["egg_info"], WITHOUT_TORCH), (["egg_info"], "")):
        base = tmp_path / str(len(list(tmp_path.iterdir())))
        base.mkdir()
        extra = ["egg_info", "--egg-base", str(base)] if commands == ["sdist"] else []
        own = ["--dist-dir", str(base)] if extra else ["--egg-base", str(base)]
        done = setup("--quiet", *extra, *commands, *own, code=code)
        assert done.returncode == 0, done.stderr
        metadata = next(base.rglob("PKG-INFO")).read_text(encoding="utf-8")
        builds = commands == ["egg_info"] and not code
        expected = f"+torch{MINOR}\n" if builds else "\n"
        assert re.search(r"^Version: \d+\.\d+\.\d+" + re.escape(expected), metadata, re.MULTILINE)
        requirement = f"torch=={MINOR}.*" if builds else "torch>=2.6"
        assert f"Requires-Dist: {requirement}\n" in metadata
        relative = re.findall(r"\]\((?!https?:|#)[^)]*\)", metadata)
        assert not relative and "](https://" in metadata


@pytest.mark.slow
def test_a_source_distribution_has_all_kernels_and_no_build(tmp_path: Path) -> None:
    done = setup(
        *("--quiet", "egg_info", "--egg-base", str(tmp_path)),
        *("sdist", "--dist-dir", str(tmp_path)),
        code=WITHOUT_TORCH,
    )
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "csrc", "fastagg", "python"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tracked.returncode == 0:
        assert set(tracked.stdout.split()) <= names
    assert any(name.endswith(".cu") for name in names)
    assert not {name for name in names if name.startswith(("tests/", "benchmarks/", "results/"))}
    built = (".so", ".pyc", "_built_for.py", "making.pyi")
    assert not {name for name in names if name.endswith(built)}
    assert {"write_stub.py", "fastagg/py.typed"} <= names


@pytest.mark.slow
def test_a_wheel_has_the_types_of_rules(tmp_path: Path) -> None:
    """Without the compilation, which does not concern them, and from sources without the stub."""
    for name in ("setup.py", "write_stub.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    uncompiled = shutil.ignore_patterns("*.so", "making.pyi", "__pycache__")
    for name in ("fastagg", "python"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=uncompiled)
    code = (
        "from torch.utils import cpp_extension\n"
        "cpp_extension.BuildExtension.run = lambda self: None"
    )
    done = setup("--quiet", "bdist_wheel", code=code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("dist/*.whl"))) as archive:
        names = set(archive.namelist())
        assert {"fastagg/py.typed", "fastagg/_built_for.py", "fastagg/_C.pyi"} <= names
        assert 'name: Literal["fdms"]' in archive.read("fastagg/making.pyi").decode()
        assert "write_stub.py" not in names


@pytest.mark.parametrize(
    ("built_for", "installed"),
    [("2.13.0+cpu", "2.13.0+cpu"), ("2.13.0+cpu", "2.13.1+cu130"), ("2.13.1", "2.13.0a0")],
)
def test_torch_of_the_same_minor_version_is_accepted(built_for: str, installed: str) -> None:
    check_torch(built_for, installed)


@pytest.mark.parametrize("installed", ["2.1.3", "2.14.0", "3.13.0", "2.130.0"])
def test_another_torch_is_refused(installed: str) -> None:
    with pytest.raises(ImportError) as error:
        check_torch("2.13.0+cpu", installed)
    message = str(error.value)
    assert "2.13.0+cpu" in message and installed in message
    assert "pip install 'torch==2.13.*'" in message and "--no-build-isolation" in message


@pytest.mark.slow
def test_the_import_checks_the_torch() -> None:
    script = "import torch; torch.__version__ = '1.0.0'; import fastagg"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"built for torch {torch.__version__}, and torch 1.0.0 is installed" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("wish", ["auto", "1"])
def test_nvcc_alone_is_no_toolkit(wish: str, tmp_path: Path) -> None:
    """Some packages install nvcc without the headers of the runtime."""
    code = (
        "import torch\nfrom torch.utils import cpp_extension\n"
        f"torch.version.cuda = '13.0'; cpp_extension.CUDA_HOME = {str(tmp_path)!r}"
    )
    done = setup("--version", code=code, FASTAGG_CUDA=wish)
    if wish == "1":
        assert done.returncode == 1 and "there is no: cuda_runtime.h in" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
