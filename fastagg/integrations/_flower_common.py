# SPDX-License-Identifier: Apache-2.0
"""What the strategies for both of Flower's APIs share: waiting for nodes, and the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from fastagg.integrations._report import RoundReport

_LOG = logging.getLogger("flwr")
_PAUSE = 1.0  # seconds from one look at the connected nodes to the next


def wait_for_nodes(connected: Callable[[], Iterable[int]], least: int, timeout: float) -> list[int]:
    """Wait until enough nodes are connected, or until ``timeout`` seconds have passed.

    Flower's strategies wait without an end: one node that is gone would stop the run.

    Args:
        connected: returns the ids of the nodes that are connected now.
        least: number of nodes to wait for.
        timeout: seconds to wait at most.

    Returns:
        The ids of the connected nodes; fewer than ``least`` after ``timeout``.
    """
    end = time.monotonic() + timeout
    told = -1
    while len(nodes := list(connected())) < least:
        left = end - time.monotonic()
        if left <= 0.0:
            warn_of_missing(len(nodes), least, timeout)
            break
        if len(nodes) != told:
            _LOG.info("\twaiting for nodes: %d of %d are connected", len(nodes), least)
            told = len(nodes)
        time.sleep(min(_PAUSE, left))
    return nodes


def warn_of_missing(connected: int, least: int, timeout: float) -> None:
    """Log that a round begins with fewer nodes than it has waited for."""
    text = "\t%d of %d nodes after %g s (node_timeout): the round goes on without the others"
    _LOG.warning(text, connected, least, timeout)


def log_report(report: RoundReport) -> None:
    """Log the report of a round; a checkpoint that could not be written is an error."""
    for line in report.lines():
        _LOG.info("\t%s", line)
    if report.checkpoint_error is not None:
        _LOG.error(
            "\tthe checkpoint was not written, the next round tries again: %s",
            report.checkpoint_error,
        )


def log_changes(changes: Sequence[str]) -> None:
    """Log the options that a resumed run has changed."""
    for change in changes:
        _LOG.warning("\tresuming with another option: %s", change)
