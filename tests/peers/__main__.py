# SPDX-License-Identifier: Apache-2.0
"""Run other projects' own tests with fastagg in the place of what they test.

    make test-peers                        everything
    make test-peers ARGS=examples          the examples in ByzFL's docstrings
    make test-peers ARGS="byzfl flower"    ByzFL's tests; Flower's tests of strategies

``fetch`` downloads all files and runs nothing. The examples need the package index only. The tests
are files of public repositories on another host (see files.py); without it, give checkouts of
these: ``--checkouts DIR`` reads DIR/LPD-EPFL/byzfl and DIR/adap/flower.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.peers import byzfl
from tests.peers.files import (
    BYZFL,
    BYZFL_TESTS,
    FLOWER_TESTS,
    NotAvailable,
    WrongContent,
    have_files,
    have_package,
)

PARTS = ["examples", "byzfl", "flower"]


def run_part(part: str, folder: Path, checkouts: Path | None) -> list[str]:
    """Run one part; return what is not as expected."""
    if part == "examples":
        return byzfl.examples(folder)
    if part == "byzfl":
        return byzfl.tests(folder, checkouts)
    if part == "flower":
        from tests.peers import flower  # needs Flower

        return flower.tests(folder, checkouts)
    have_package(BYZFL, folder)
    have_files(BYZFL_TESTS, folder, checkouts)
    have_files(FLOWER_TESTS, folder, checkouts)
    return []


def main() -> int:
    """Return 0 if all results are as expected, 2 if a file could not be had, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {PARTS}, or fetch")
    parser.add_argument("--folder", type=Path, required=True, help="where files are kept")
    parser.add_argument("--checkouts", type=Path, help="read the tests from checkouts in there")
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    unknown = sorted({*parts} - {*PARTS, "fetch"})
    if unknown:
        parser.error(f"PART: expected some of {[*PARTS, 'fetch']}, got {unknown}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    try:
        for part in parts:
            problems += run_part(part, arguments.folder.resolve(), arguments.checkouts)
    except NotAvailable as error:
        print(f"not available: {error}", file=sys.stderr)
        return 2
    except WrongContent as error:
        problems.append(str(error))
    for problem in problems:
        print(f"not as expected: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
