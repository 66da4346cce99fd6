# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin, ``-p benchmarks.report_at_once``: print a failure when it happens.

pytest itself prints failures at the end, which a run that is killed does not reach.
"""

from __future__ import annotations

from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """Print where and why a test or its set-up failed."""
    if report.failed:
        print(f"\n--- {report.nodeid}, {report.when}\n{report.longreprtext}\n---", flush=True)


def pytest_collectreport(report: Any) -> None:
    """Print why a file could not be imported."""
    if report.failed:
        print(f"\n--- {report.nodeid}\n{report.longreprtext}\n---", flush=True)
