#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build and test fastagg for several versions of Python and PyTorch, and write a table.

    .ci/matrix.py [--uv PATH] [--out FILE] [--pythons 3.10 3.13] [--torches 2.6 2.10 2.15]

For each pair: an empty environment, `uv pip install --no-build-isolation` of the source
distribution in dist/ (make wheel), `python -m fastagg`, and tests of the ops and rules. Lines of
earlier runs for other pairs stay in the table. Optimization is off: this shows what compiles and
works, and `make test` tests the optimized kernels.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.6", "2.10", "2.15")
TESTS = ("ops/test_gram.py", "ops/test_rows.py", "ops/test_policy.py", "ops/test_registration.py")
TESTS += ("rules/test_fdms.py", "rules/test_mimic.py", "rules/test_every_rule.py")
NO_PYTHON = "there is no such Python here"
HEAD = """# Pythons and PyTorches

`make matrix` builds the source distribution in an empty environment for each pair, without
optimization, checks every op with `python -m fastagg`, and runs tests of ops and rules.

| Python | PyTorch | result |
|---|---|---|
"""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def run(command: list[str], cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    if done.returncode != 0:
        raise RuntimeError(output)
    return output


def result(uv: str, python: str, torch: str, sdist: Path) -> tuple[str, str]:
    """Return (the exact version of torch, what came out)."""
    with tempfile.TemporaryDirectory() as folder:
        home, found = Path(folder), torch
        env = {
            "VIRTUAL_ENV": str(home / "env"),
            "UV_CACHE_DIR": str(home / "cache"),
            "FASTAGG_CUDA": "0",
            "CXXFLAGS": "-O0 -DFASTAGG_WITHOUT_AVX512",
            "HYPOTHESIS_PROFILE": "quick",
        }
        own = str(home / "env/bin/python")
        stage = NO_PYTHON
        try:
            run([uv, "venv", "--python", python, str(home / "env")], home, env)
            stage = "there is no such PyTorch for this Python"
            needed = [f"torch=={torch}.*", "setuptools>=77", "ninja", "numpy"]
            needed += ["pytest", "hypothesis"]
            run([uv, "pip", "install", *needed], home, env)
            version = run([own, "-c", "import torch; print(torch.__version__)"], home, env)
            found = version.split()[-1]
            stage = "the build failed"
            run([uv, "pip", "install", "--no-build-isolation", str(sdist)], home, env)
            stage = "the self-check failed"
            check = run([own, "-m", "fastagg"], home, env).splitlines()[-1].partition(",")[0]
            stage = "tests failed"
            shutil.copytree(ROOT / "tests", home / "tests")
            shutil.copy(ROOT / "pyproject.toml", home)
            tests = [f"tests/{name}" for name in TESTS]
            options = ["-q", "-m", "not slow", "-k", "not portable", "-p", "no:cacheprovider"]
            outcome = run([own, "-m", "pytest", *options, *tests], home, env).splitlines()[-1]
        except RuntimeError as error:
            print(str(error)[-6000:], file=sys.stderr, flush=True)
            return found, stage
        return found, f"{check}; {outcome.partition(' in ')[0].strip('= ')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/wheels.md")
    parser.add_argument("--pythons", nargs="+", default=PYTHONS)
    parser.add_argument("--torches", nargs="+", default=TORCHES)
    arguments = parser.parse_args()
    (sdist,) = (ROOT / "dist").glob("fastagg-*.tar.gz")
    lines: dict[tuple[str, str], str] = {}
    if arguments.out.exists():
        for line in arguments.out.read_text(encoding="utf-8").splitlines()[7:]:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            lines[cells[0], ".".join(cells[1].split(".")[:2])] = line
    failed = False
    for torch in arguments.torches:
        for python in arguments.pythons:
            say(f"Python {python}, PyTorch {torch}")
            found, text = result(arguments.uv, python, torch, sdist)
            say(f"  {found}: {text}")
            failed |= "failed" in text
            if text == NO_PYTHON and (python, torch) in lines:
                continue  # another machine had it
            lines[python, torch] = f"| {python} | {found} | {text} |"
            table = [lines[pair] for pair in sorted(lines, key=by_number)]
            arguments.out.write_text(HEAD + "\n".join(table) + "\n", encoding="utf-8")
    return int(failed)


def by_number(pair: tuple[str, str]) -> list[list[int]]:
    python, torch = ([int(part) for part in version.split(".")] for version in pair)
    return [torch, python]


if __name__ == "__main__":
    sys.exit(main())
