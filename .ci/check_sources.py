#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check every tracked file for a licence header and for paths and hosts of one machine.

A source file names its licence in one of its first two lines. No file contains an absolute path of
a developer's machine or the name of a package registry's host: both break on other machines.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LICENCE = "SPDX-License-Identifier: Apache-2.0"
SOURCE_SUFFIXES = {".py", ".h", ".cpp", ".cuh", ".cu", ".sh"}

# The hosts are written in pieces, so that this file does not find itself.
MACHINE_PATHS = r"(?<![\w.$}/-])/(?:work|root|home/\w+|Users/\w+|tmp/\w+|workspace|mnt/\w+)/"
HOSTS = "|".join(
    rf"{name}\.{ending}"
    for name, ending in [
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npm" + "js", "(?:org|com)"),
        ("download.py" + "torch", "org"),
        ("deb.de" + "bian", "org"),
        ("conda.ana" + "conda", "org"),
    ]
)
FORBIDDEN = re.compile(f"{MACHINE_PATHS}|{HOSTS}")


def problems(path: Path) -> list[str]:
    content = path.read_bytes()
    if b"\0" in content[:8192]:  # binary: figures
        return []
    name = path.relative_to(ROOT).as_posix()
    lines = content.decode("utf-8").splitlines()
    found = [
        f"{name}:{number}: {match.group()!r} exists on one machine only"
        for number, line in enumerate(lines, start=1)
        if (match := FORBIDDEN.search(line))
    ]
    if path.suffix in SOURCE_SUFFIXES and not any(LICENCE in line for line in lines[:2]):
        found.append(f"{name}:1: expected '{LICENCE}' in the first two lines")
    return found


def main() -> int:
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listing.rstrip("\0").split("\0")]
    found = [problem for path in files if path.is_file() for problem in problems(path)]
    print("\n".join(found) or f"{len(files)} files: licence headers and names are correct")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
