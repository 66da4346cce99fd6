# SPDX-License-Identifier: Apache-2.0
"""Execute a page of docs/ exactly as it is written, in an empty folder.

    .ci/run_page.py docs/flower_start.md FOLDER --expect '^finished$' --times 2

A block with a title, ```python title="app/task.py"``, is a file. The ```sh blocks run one after
another in one bash, which stops at the first error. In the end all processes that the page has
left behind are killed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
MARK = "FASTAGG_PAGE"


def script(text: str) -> str:
    """Return the commands of a page, with its files as here documents."""
    lines = ["set -eo pipefail"]
    for language, title, body in BLOCK.findall(text):
        if title:
            lines += [f"mkdir -p {Path(title).parent}", f"cat > {title} <<'END OF FILE'"]
            lines += [body + "END OF FILE"]
        elif language == "sh":
            lines += [f'echo "== after $SECONDS s: {body.splitlines()[0]}"', body]
    return "\n".join([*lines, 'echo "== the end, after $SECONDS s"', ""])


def kill_all(mark: str) -> None:
    """Kill the processes that have inherited the mark in their environment."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            try:
                if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue  # it has ended, or is another user's


def main() -> int:
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("page", type=Path)
    command.add_argument("folder", type=Path, help="is made; the commands run there")
    command.add_argument("--expect", metavar="REGEX", default="", help="lines of the output")
    command.add_argument("--times", type=int, default=1, help="how many lines are expected")
    command.add_argument("--limit", type=float, default=600.0, help="seconds; default: 600")
    options = command.parse_args()
    options.folder.mkdir(parents=True)
    log = options.folder / "output.log"
    mark = f"{os.getpid()}-{time.time_ns()}"
    try:
        with log.open("wb") as output:
            done = subprocess.run(
                ["bash", "-c", script(options.page.read_text(encoding="utf-8"))],
                cwd=options.folder,
                env={**os.environ, MARK: mark},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=options.limit,
            )
        problem = f"status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"it did not end within {options.limit:.0f} s"
    finally:
        kill_all(f"{MARK}={mark}")
    text = log.read_text(encoding="utf-8", errors="replace")
    found = len(re.findall(options.expect, text, re.MULTILINE))
    if not problem and found != options.times:
        problem = f"expected {options.times} lines {options.expect!r}, got {found}"
    print("\n".join(re.findall(r"^(?:==|round).*", text, re.MULTILINE)))
    if problem:
        print(text[-6000:], f"{options.page}: {problem}", sep="\n")
    return bool(problem)


if __name__ == "__main__":
    sys.exit(main())
