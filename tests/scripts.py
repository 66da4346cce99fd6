# SPDX-License-Identifier: Apache-2.0
"""Run the programs that pages print, and those of tests, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Seconds after which a process that a test waits for counts as hung. On a machine that other tests
# load, a process may need minutes to import torch. A wait ends with what it waits for, so that the
# limit costs nothing.
HANG = 600.0


def python_block(page: str) -> str:
    """Return the only Python block of a page of docs/."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return str(block)


def run_script(text: str, folder: Path, *, name: str = "run.py", seconds: float = HANG) -> str:
    """Write a program to a folder, run it there with the import paths of this process.

    Returns:
        Its output. A program that fails is an AssertionError with the end of its output.
    """
    (folder / name).write_text(text, encoding="utf-8")
    paths = [str(ROOT), str(ROOT / "python"), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
