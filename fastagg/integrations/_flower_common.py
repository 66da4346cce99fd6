# SPDX-License-Identifier: Apache-2.0
"""What the strategies for both of Flower's APIs share: waiting for nodes, and the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from fastagg.integrations._report import Answer, RoundReport
from fastagg.integrations._server import AggregationServer
from fastagg.integrations._wire import Arrays

_LOG = logging.getLogger("flwr")
IdFn = Callable[[Any, dict[str, Any]], int]
"""(node id, metrics of its answer) -> client id."""

_PAUSE = 1.0  # seconds from one look at the connected nodes to the next


def id_source(ids: object) -> str:
    """Return the source of ids (:class:`ClientIds`) for the option ``ids`` of a strategy.

    Raises:
        ValueError: it is neither "partition" nor "node" nor a function.
    """
    if callable(ids):
        return "trusted"
    if ids not in ("partition", "node"):
        raise ValueError(f'ids: expected "partition", "node" or a function, got {ids!r}')
    return str(ids)


def answer_with_id(
    sender: str, arrays: Arrays, function: IdFn, node: int | str, metrics: dict[str, Any]
) -> Answer:
    """Return an answer with the id that ``function`` returns, or why there is none."""
    try:
        client = function(node, metrics)
    except Exception as error:  # metrics come from the client, and may lack what it reads
        return Answer(sender, {}, problem=f"ids: the function raised {error!r}")
    if isinstance(client, bool) or not isinstance(client, int):
        return Answer(sender, {}, problem=f"ids: expected an int of the function, got {client!r}")
    return Answer(sender, arrays, client)


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


def log_weighing(server: AggregationServer, key: str) -> None:
    """Log in the first round of a run why answers do not count by their weights."""
    if server.rounds == 0 and server.weighing.reason:
        _LOG.info("\t%s weighs metrics only, not updates: %s", key, server.weighing.reason)


def log_report(report: RoundReport) -> None:
    """Log the report of a round; a checkpoint that could not be written is an error."""
    for line in report.lines():
        _LOG.info("\t%s", line)
    if report.checkpoint_error is not None:
        _log_checkpoint_error(report.checkpoint_error)


def settle_round(server: AggregationServer, report: RoundReport | None) -> RoundReport | None:
    """End the server's round, whose model is now that of the next one; return its report.

    A checkpoint that could not be written is an error in the log and in the report.
    """
    error = server.settle_round()
    if error is not None:
        _log_checkpoint_error(error)
        report = None if report is None else replace(report, checkpoint_error=error)
    return report


def _log_checkpoint_error(error: str) -> None:
    _LOG.error("\tthe checkpoint was not written, the next round tries again: %s", error)


def log_changes(changes: Sequence[str]) -> None:
    """Log the options that a resumed run has changed."""
    for change in changes:
        _LOG.warning("\tresuming with another option: %s", change)
