# SPDX-License-Identifier: Apache-2.0
"""The strategy for Flower's older API, ``flwr.server``."""

from __future__ import annotations

import logging
import math
import operator
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters, Scalar
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.strategy.aggregate import weighted_loss_avg

from fastagg.aggregator import Aggregator
from fastagg.integrations._empty_rounds import close_and_note
from fastagg.integrations._flower_common import (
    IdFn,
    answer_with_id,
    check_secure_aggregation,
    check_wrappers,
    close_missed_round,
    id_source,
    log_changes,
    log_report,
    log_weighing,
    settle_round,
    warn_of_missing,
)
from fastagg.integrations._flower_legacy_late import LateResults
from fastagg.integrations._flower_metrics import combine_results
from fastagg.integrations._hosted_rule import check_option_names
from fastagg.integrations._report import Answer, RoundReport
from fastagg.integrations._server import AggregationServer
from fastagg.integrations._untrusted import brief, cut, is_finite
from fastagg.options import read_positive
from fastagg.updates.roles import Roles

_LOG = logging.getLogger("flwr")
_NUMPY = "numpy.ndarray"  # Flower's name for arrays that are serialized as .npy files

_MOST_EXAMPLES = 2**63  # on the wire, num_examples is an int64

FitFailure = tuple[ClientProxy, FitRes] | BaseException
EvaluateFailure = tuple[ClientProxy, EvaluateRes] | BaseException


class FastAggLegacyStrategy(FedAvg):
    """A strategy for ``flwr.server`` that aggregates with a rule of fastagg.

    It is :class:`fastagg.integrations.flower.FastAggStrategy` for the older API: clients report
    their partition in the metrics that ``fit`` returns. A client that does not report it is known
    by its ``cid``, which changes with every connection.

    ``flwr.server.Server`` counts rounds from 1 after a restart: to finish 100 rounds after a
    checkpoint of round 40, pass ``num_rounds=60``. SIGINT and SIGTERM write a last checkpoint
    before they take their usual effect.

    Args:
        rule: the name of a rule, or an aggregator made with ``nonfinite="drop"``.
        num_clients: K, the number of partitions; may be left out if ``rule`` is an aggregator.
        max_clients: as in the other API.
        partition_key: the metric with which clients report their partition, an int in [0, K).
        seed: seed of the sampling of clients, which is a function of the seed, the round and the
            clients' ids.
        checkpoint_path: file for checkpoints of the run; its folder must exist. None writes none.
        checkpoint_every: number of rounds from one checkpoint to the next.
        inbox_path: as in the other API.
        checkpoint_keep, node_timeout, min_answers, max_empty_rounds: as in the other API.
        ids, release_after, selection: as in the other API; nodes are named by their ``cid``.
        roles: as in the other API. Arrays have no names here: patterns match the names of
            ``names``. Clients answer with all arrays, or with all but "local" ones, in the order of
            the model.
        names: the names of all arrays of the model, in order, such as ``[*module.state_dict()]``.
            None: arrays are named by position, "0", "1", ...; then running statistics are not
            recognised.
        weighted: as in the other API; weights are the ``num_examples`` of results.
        resume_from: checkpoint from which to continue.
        rule_options: options of the rule, if it is given by name, such as ``max_norm``. With
            ``staleness`` and ``max_staleness``, a result that comes after the ``round_timeout`` of
            its round counts in a later one, with its age. Until it comes, its client is not asked
            again.
        **options: options of Flower's ``FedAvg``: ``fraction_fit``, ``min_fit_clients``, ...

    Attributes:
        server: model, rule and ids: a :class:`fastagg.integrations._server.AggregationServer`.
        last_report: report of the last round; None before the first.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
    """

    def __init__(
        self,
        rule: str | Aggregator,
        *,
        num_clients: int | None = None,
        max_clients: int | None = None,
        partition_key: str = "partition-id",
        seed: int = 0,
        checkpoint_path: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1,
        checkpoint_keep: int = 2,
        inbox_path: str | os.PathLike[str] | None = None,
        node_timeout: float = 600.0,
        min_answers: int = 0,
        max_empty_rounds: int = 10,
        ids: str | IdFn = "partition",
        release_after: int | None = 0,
        selection: str = "random",
        roles: Roles = "auto",
        names: Sequence[str] | None = None,
        weighted: bool | None = None,
        resume_from: str | os.PathLike[str] | None = None,
        rule_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.partition_key = partition_key
        self._id_fn = ids if callable(ids) else None
        self.seed = seed
        self.node_timeout = read_positive("node_timeout", node_timeout)
        self.resume_from = resume_from
        self.names = None if names is None else [*names]
        check_option_names(rule, rule_options or {})
        self.server = AggregationServer(
            rule,
            num_clients=num_clients,
            max_clients=max_clients,
            checkpoint_path=checkpoint_path,
            checkpoint_every=checkpoint_every,
            checkpoint_keep=checkpoint_keep,
            inbox_path=inbox_path,
            min_answers=min_answers,
            max_empty_rounds=max_empty_rounds,
            ids=id_source(ids),
            release_after=release_after,
            selection=selection,
            roles=roles,
            weighted=weighted,
            **(rule_options or {}),
        )
        if self.server.example.max_staleness and not self.accept_failures:
            raise ValueError(
                "accept_failures: expected True with max_staleness, because a late client is a "
                "failure of its round, got False"
            )
        self.last_report: RoundReport | None = None
        self._late = LateResults(self._keep_late)
        self._sent: Parameters | None = None  # the global model in the form that is sent
        self._data: list[bytes] = []  # its arrays when it was made

    def __repr__(self) -> str:
        return (
            f"FastAggLegacyStrategy({self.server.rule_name!r}, num_clients="
            f"{self.server.num_clients}, accept_failures={self.accept_failures})"
        )

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """Return the checkpoint's model, the given one, or None: then Flower asks a client."""
        if self.server.checkpoint_path is not None and not self.server.guard.install():
            _LOG.warning("not in the main thread: SIGINT and SIGTERM will not write a checkpoint")
        if self.resume_from is None:
            return super().initialize_parameters(client_manager)
        log_changes(self.server.resume(self.resume_from))
        if self.names not in (None, self.server.names()):
            raise ValueError(
                f"names: expected those of the checkpoint, {self.server.names()[:10]}, got "
                f"{self.names}"
            )
        _LOG.info("resuming after round %d", self.server.rounds)
        return self._model()

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Return the instructions of a round; store the model and the clients that are asked."""
        check_wrappers(self.server)
        check_secure_aggregation(self.server)
        self._settle(parameters)
        close_missed_round(self.server, self._note)
        config = {} if self.on_fit_config_fn is None else self.on_fit_config_fn(server_round)
        proxies = self._wait(client_manager, self.min_fit_clients)
        count, _ = self.num_fit_clients(len(proxies))
        free = self._free(proxies, self.node_timeout)
        asked = self.server.sample(free, count, self.seed)
        self.server.open_round(asked, list(proxies))
        if not asked:  # then Flower's server does not call aggregate_fit
            why = "no client is connected" if not proxies else "all clients work on earlier rounds"
            close_and_note(lambda: self.server.skip_round(why), self._note)
            return []
        fit_ins = FitIns(self._model(), config)
        chosen = [proxies[cid] for cid in asked]
        if self.server.takes_late_answers and chosen:
            chosen = self._late.watched(chosen, self.server.rounds + 1)
        return [(proxy, fit_ins) for proxy in chosen]

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Return the evaluation instructions of a round, for clients drawn as in training."""
        self._settle(parameters)
        if self.fraction_evaluate == 0.0:
            return []
        chosen = self.on_evaluate_config_fn
        config = {} if chosen is None else chosen(server_round)
        proxies = self._wait(client_manager, self.min_evaluate_clients)
        count, _ = self.num_evaluation_clients(len(proxies))
        asked = self.server.sample(self._free(proxies, 0.0), count, self.seed, purpose="evaluate")
        return [(proxies[cid], EvaluateIns(parameters, config)) for cid in asked]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[FitFailure],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Return the new model, None if it did not change, and the metrics of active clients."""
        for failure in failures:
            _LOG.info("\t> Received failure: %s", _reason(failure))
        if failures and not self.accept_failures:
            why = "clients failed, and accept_failures is False"
            close_and_note(lambda: self.server.skip_round(why), self._note)
            return None, {}
        answers = [self._read(proxy.cid, result) for proxy, result in results]
        if self.server.takes_late_answers:
            self._late.check_called()
        log_weighing(self.server, "num_examples")
        report = close_and_note(lambda: self.server.close_round(answers, settled=False), self._note)
        metrics: dict[str, Scalar] = {}
        if self.fit_metrics_aggregation_fn is not None:
            used = {p.cid: _note(r) for p, r in results} | report.late_notes
            order = sorted(report.ids.keys() & used.keys(), key=lambda cid: report.ids[cid])
            metrics = combine_results(
                {cid: (used[cid]["num_examples"], used[cid]["metrics"] or {}) for cid in order},
                self.fit_metrics_aggregation_fn,
            )
        if not report.moved:
            return None, metrics
        self._sent = None
        return self._model(), metrics

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[EvaluateFailure],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Return the mean loss and the metrics of the usable results; None if there is no mean."""
        for failure in failures:
            _LOG.info("\t> Received failure: %s", _reason(failure))
        if failures and not self.accept_failures:
            return None, {}
        usable: dict[str, EvaluateRes] = {}
        for proxy, result in results:
            problem = _evaluation_problem(result)
            if problem is None:
                usable[proxy.cid] = result
            else:
                _LOG.warning("\trejected evaluation of %s: %s", cut(proxy.cid), problem)
        known = self.server.ids.known
        order = sorted(usable, key=lambda cid: (known.get(cid, self.server.num_clients), cid))
        if sum(result.num_examples for result in usable.values()) == 0:
            if usable:
                _LOG.warning("\tno loss: the sum of num_examples is 0")
            return None, {}
        loss = _mean_loss([(usable[cid].num_examples, usable[cid].loss) for cid in order])
        metrics: dict[str, Scalar] = {}
        if self.evaluate_metrics_aggregation_fn is not None:
            metrics = combine_results(
                {cid: (usable[cid].num_examples, usable[cid].metrics or {}) for cid in order},
                self.evaluate_metrics_aggregation_fn,
            )
        return loss, metrics

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Scalar]] | None:
        """Evaluate the model on the server; write the checkpoint of the round before, if due."""
        self._settle(parameters)
        return super().evaluate(server_round, parameters)

    def _note(self, report: RoundReport) -> None:
        """Store and log the report of a round."""
        self.last_report = report
        log_report(report)

    def _settle(self, parameters: Parameters) -> None:
        """Make ``parameters`` the model, and end the round before, if that is not done yet."""
        # A subclass may have changed an array of the model that it got.
        data = parameters.tensors
        same = len(data) == len(self._data) and all(map(operator.is_, data, self._data))
        if self._sent is None or parameters is not self._sent or not same:
            self.server.set_model(self._arrays(parameters))
            self._sent = None
        self.last_report = settle_round(self.server, self.last_report)

    def _wait(self, client_manager: ClientManager, least: int) -> dict[str, ClientProxy]:
        """Wait for clients, at most ``node_timeout`` seconds; return those that are connected."""
        least = max(self.min_available_clients, least)
        # Python waits no longer: it would raise an OverflowError.
        seconds = math.ceil(min(self.node_timeout, threading.TIMEOUT_MAX))
        if not client_manager.wait_for(least, timeout=seconds):
            warn_of_missing(client_manager.num_available(), least, self.node_timeout)
        return client_manager.all()

    def _free(self, proxies: dict[str, ClientProxy], timeout: float) -> list[str]:
        """Return the clients that do not work on an earlier round; wait for one of them."""
        if not self.server.takes_late_answers:
            return list(proxies)
        free = self._late.wait_for_one(proxies, timeout)
        return [cid for cid in proxies if cid in free]

    def _keep_late(self, cid: str, number: int, result: FitRes) -> None:
        """Keep a result that came after the end of its round; called from the client's thread."""
        answer = self._read(cid, result)
        self.server.put_late(replace(answer, round=number, note=_note(result)))

    def _model(self) -> Parameters:
        """Return the global model to send; the same object until the model changes."""
        if self._sent is None:
            self._data = list(self.server.arrays().values())
            self._sent = Parameters([*self._data], tensor_type=_NUMPY)
        return self._sent

    def _read(self, cid: str, result: FitRes) -> Answer:
        """Return the answer in a result; its ``problem`` is set if it cannot be used."""
        if result.parameters.tensor_type != _NUMPY:
            got = brief(result.parameters.tensor_type)
            return Answer(cid, {}, problem=f"parameters: expected tensor_type {_NUMPY}, got {got}")
        problem = _number_problem(result.num_examples)
        if problem is not None:
            return Answer(cid, {}, problem=problem)
        arrays, metrics = self._arrays(result.parameters), result.metrics or {}
        if self._id_fn is not None:
            answer = answer_with_id(cid, arrays, self._id_fn, cid, dict(metrics))
        else:
            answer = Answer(cid, arrays, metrics.get(self.partition_key))
        return replace(answer, weight=result.num_examples)

    def _arrays(self, parameters: Parameters) -> dict[str, bytes]:
        """Return the tensors by name; they have none in this API.

        Raises:
            ValueError: this is the first model, and there are not as many arrays as names.
        """
        count = len(parameters.tensors)
        if self.server.has_model:
            return dict(zip(self.server.names(count), parameters.tensors, strict=True))
        names = [str(index) for index in range(count)] if self.names is None else self.names
        if len(names) != count or len({*names}) != count:
            raise ValueError(
                f"names: expected a different one for each of the {count} arrays of the model, got "
                f"{len(names)}: {names[:10]}"
            )
        return dict(zip(names, parameters.tensors, strict=True))


def _number_problem(number: object) -> str | None:
    """Return why a number of examples cannot be a weight, or None."""
    if is_finite(number) and 0 <= cast(float, number) <= _MOST_EXAMPLES:
        return None
    return f"num_examples: expected a finite number >= 0, got {brief(number)}"


def _evaluation_problem(result: EvaluateRes) -> str | None:
    """Return why the result of an evaluation cannot be used, or None."""
    if not is_finite(result.loss):
        return f"loss: expected a finite number, got {brief(result.loss)}"
    return _number_problem(result.num_examples)


def _mean_loss(losses: list[tuple[int, float]]) -> float:
    """Return the mean of finite losses, weighted by numbers of examples that do not sum to 0."""
    mean = weighted_loss_avg(losses)
    if math.isfinite(mean):
        return float(mean)
    total = sum(number for number, _ in losses)  # products are beyond the range of a float
    return sum(number / total * loss for number, loss in losses)


def _note(result: FitRes) -> dict[str, Any]:
    """Return what the function of the user for metrics gets of a result."""
    return {"num_examples": result.num_examples, "metrics": result.metrics}


def _reason(failure: FitFailure | EvaluateFailure) -> str:
    """Return a failure as text."""
    if isinstance(failure, BaseException):
        return cut(repr(failure))
    proxy, result = failure
    return cut(f"client {proxy.cid}: {result.status}")
