# SPDX-License-Identifier: Apache-2.0
"""Run tests of another project with pytest, with the differences from it that are expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:benchmark"]
OPTIONS += ["--import-mode=prepend", "-W", "ignore"]  # warnings are the other project's


class Expectations:
    """A plugin of pytest: marks expected differences, leaves tests out, and counts results.

    Args:
        differences: reason by name of the test, ``FILE::[CLASS::]NAME`` with the path from the
            folder that is run. Such a test must fail.
        left_out: the same of tests that are not run.
    """

    def __init__(self, differences: Mapping[str, str], left_out: Mapping[str, str]) -> None:
        self.differences = dict(differences)
        self.left_out = dict(left_out)
        self.counts: Counter[str] = Counter()
        self.unknown: set[str] = set()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Mark and leave out tests, and note names that are no test's."""
        left_out = [item for item in items if item.nodeid in self.left_out]
        self.unknown = {*self.differences, *self.left_out} - {item.nodeid for item in items}
        items[:] = [item for item in items if item.nodeid not in self.left_out]
        config.hook.pytest_deselected(items=left_out)
        for item in items:
            if item.nodeid in self.differences:
                reason = self.differences[item.nodeid]
                mark = pytest.mark.xfail(raises=AssertionError, reason=reason, strict=True)
                item.add_marker(mark)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test: "passed", "different" as expected, or "failed"."""
        if report.failed:
            self.counts["failed"] += 1
        elif report.when == "call":
            self.counts["different" if hasattr(report, "wasxfail") else "passed"] += 1


def run(
    folder: Path,
    paths: list[str],
    *,
    passing: int,
    differences: Mapping[str, str],
    left_out: Mapping[str, str],
) -> list[str]:
    """Run the tests in ``paths`` of ``folder``; return what is not as expected.

    Args:
        passing: number of tests that must pass. The files are pinned, so another number means that
            tests were not collected.
    """
    # Without an ini file of its own, pytest would take one of a folder above.
    settings = folder / "pytest.ini"
    settings.write_text("[pytest]\n")
    expectations = Expectations(differences, left_out)
    arguments = [*OPTIONS, "-c", str(settings), "--rootdir", str(folder)]
    status = pytest.main(
        [*arguments, *(str(folder / path) for path in paths)], plugins=[expectations]
    )
    counts = expectations.counts
    problems = [f"{name} is no test" for name in sorted(expectations.unknown)]
    if counts["passed"] != passing:
        problems.append(f"expected {passing} tests that pass, got {counts['passed']}")
    if counts["failed"] or status != pytest.ExitCode.OK:
        problems.append(f"{counts['failed']} tests failed; pytest ended with {status!r}")
    return problems
