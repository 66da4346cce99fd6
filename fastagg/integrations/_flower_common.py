# SPDX-License-Identifier: Apache-2.0
"""What the strategies for both of Flower's APIs share: waiting for nodes, and the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from fastagg.integrations._empty_rounds import close_and_note
from fastagg.integrations._report import Answer, RoundReport, not_written
from fastagg.integrations._server import AggregationServer
from fastagg.integrations._untrusted import brief
from fastagg.integrations._wire import Arrays

_LOG = logging.getLogger("flwr")
IdFn = Callable[[Any, dict[str, Any]], int]
"""(node id, metrics of its answer) -> client id."""

_WRAPPERS = ("DifferentialPrivacyClientSide", "DifferentialPrivacyServerSide", "DPFedAvg")
_EQUAL = "DPFedAvg"  # the wrappers that give all results the same number of examples
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
        problem = f"ids: expected an int of the function, got {brief(client)}"
        return Answer(sender, {}, problem=problem)
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


def check_wrappers(server: AggregationServer) -> None:
    """Check that none of Flower's wrappers for differential privacy runs a rule that it cannot.

    Call it where a strategy is called to configure a round: a wrapper does that, and is a caller.
    They add noise for the sensitivity of a mean, clipping_norm / num_sampled_clients.

    Raises:
        ValueError: the aggregate of the rule is no mean with equal weights, or has late answers,
            which do not pass the wrapper.
    """
    wrapper = _caller(_WRAPPERS)
    if wrapper is None:
        return
    problem = _more_than_a_mean(server, server.weighing.used and not wrapper.startswith(_EQUAL))
    if not problem:
        return
    raise ValueError(
        f"{wrapper} adds noise for a mean of clipped updates with equal weights, in which "
        f"one client has the factor 1 / num_sampled_clients, but {problem}; so its noise would "
        "guarantee less than it says. Use the options clip_norm and noise_multiplier of "
        "fastagg, which know the sensitivity of the rule (docs/privacy.md)"
    )


def check_secure_aggregation(server: AggregationServer) -> None:
    """Check that no rule that needs single updates runs under Flower's secure aggregation.

    Call it where a strategy is called to configure a round. SecAgg+ puts the mean of all models in
    the place of each result, so the rule would take it for every client's own.

    Raises:
        ValueError: the rule needs single updates, or clips them.
    """
    rule = server.example
    if rule.name == "fedavg" and rule.clip_norm is None:
        return
    workflow = _caller(("SecAgg",))
    if workflow is None:
        return
    needs = f"the rule {rule.name!r}" if rule.name != "fedavg" else "clip_norm"
    raise ValueError(
        f"{workflow} gives a strategy the mean of all models in the place of each model, but "
        f"{needs} needs the update of each client. Use the rule 'fedavg' without clip_norm; "
        "docs/security.md has the rules for which a sum is enough"
    )


def _caller(names: tuple[str, ...]) -> str | None:
    """Return the name of the class of Flower that begins with one of ``names`` and is a caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = type(frame.f_locals.get("self"))
        if caller.__module__.startswith("flwr.") and caller.__name__.startswith(names):
            return caller.__name__
        frame = frame.f_back
    return None


def _more_than_a_mean(server: AggregationServer, weighted: bool) -> str:
    """Return why one client may change the model by more than in a mean; empty if it may not.

    Args:
        server: with the rule.
        weighted: whether the weights of updates may differ.
    """
    rule = server.example
    if rule.name != "fedavg":
        return f"the rule {rule.name!r} may give a client a larger factor, or remember its update"
    if weighted:
        return "updates have the weights num-examples (pass weighted=False)"
    if rule.tells_clients_apart:
        return "the rule has client_weights that differ"
    if rule.max_staleness:
        return "max_staleness lets late answers count, which the wrapper neither clips nor counts"
    if rule.server_lr > 1.0 or rule.server_optimizer.name != "sgd":
        return f"the step has server_lr={rule.server_lr:g} and {rule.server_optimizer}"
    return ""


def log_weighing(server: AggregationServer, key: str) -> None:
    """Log in the first round of a run why answers do not count by their weights."""
    if server.rounds == 0 and server.weighing.reason:
        _LOG.info("\t%s weighs metrics only, not updates: %s", key, server.weighing.reason)


def log_report(report: RoundReport) -> None:
    """Log the report of a round."""
    for level, line in report.leveled_lines():
        _LOG.log(level, "\t%s", line)


def settle_round(server: AggregationServer, report: RoundReport | None) -> RoundReport | None:
    """End the server's round, whose model is now that of the next one; return its report.

    A checkpoint that could not be written is an error in the log and in the report.
    """
    error = server.settle_round()
    if error is not None:
        _LOG.error("\t%s", not_written(error))
        report = None if report is None else replace(report, checkpoint_error=error)
    return report


def close_missed_round(server: AggregationServer, note: Callable[[RoundReport], None]) -> None:
    """Close the round before, if it was never aggregated, and pass its report to ``note``.

    Flower's wrappers for differential privacy leave a strategy out when a client has failed. The
    round counts nevertheless: otherwise the next one would draw the same clients, and so on.
    """
    if server.has_open_round:
        why = "the round was not aggregated, perhaps because a client failed"
        close_and_note(lambda: server.skip_round(why), note)


def save_last(server: AggregationServer) -> None:
    """Write the checkpoint of a run that has ended, if it is missing.

    One that cannot be written is an error in the log: the run has a result, which must not be lost.
    """
    try:
        server.save_if_due()
    except (OSError, ValueError, MemoryError) as error:
        _LOG.error("\tthe last checkpoint was not written: %s", str(error) or type(error).__name__)


def log_changes(changes: Sequence[str]) -> None:
    """Log the options that a resumed run has changed."""
    for change in changes:
        _LOG.warning("\tresuming with another option: %s", change)
