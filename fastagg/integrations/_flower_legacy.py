# SPDX-License-Identifier: Apache-2.0
"""The strategy for Flower's API before messages."""

from __future__ import annotations

import logging
import os
from typing import Any

from flwr.common import FitIns, FitRes, Parameters, Scalar
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg

from fastagg.aggregator import Aggregator
from fastagg.integrations._report import Answer, RoundReport
from fastagg.integrations._server import AggregationServer

_LOG = logging.getLogger("flwr")
_NUMPY = "numpy.ndarray"  # how arrays are serialised: as .npy files
_A_DAY = 86_400  # seconds that Flower waits for enough clients, too

Failure = tuple[ClientProxy, FitRes] | BaseException


class FastAggLegacyStrategy(FedAvg):
    """A strategy of ``flwr.server`` whose server aggregates by a rule of fastagg.

    As :class:`fastagg.integrations.flower.FastAggStrategy`, with the names of this API: clients
    report their partition in the metrics that ``fit`` returns, and are otherwise known by their
    ``cid``, which is another one after every connection.

    ``flwr.server.Server`` counts its rounds from 1 after a restart: of 100 rounds, a run that
    resumes after 40 is given ``num_rounds=60``. SIGINT and SIGTERM write a last checkpoint, then do
    what they did when the run began.

    Args:
        rule: the name of a rule, or an aggregator made with ``nonfinite="drop"``.
        num_clients: K, the number of partitions; an aggregator knows its own.
        partition_key: the metric under which clients report their partition, an int in [0, K).
        seed: clients are sampled as a function of the seed, the round and the clients' ids.
        checkpoint_path: the file that holds the state of the run; its folder must exist.
        checkpoint_every: rounds from one checkpoint to the next.
        resume_from: the checkpoint to go on from.
        rule_options: of the rule, if it is given by name, such as ``max_norm``.
        **options: those of Flower's ``FedAvg``: ``fraction_fit``, ``min_fit_clients``, ...

    Attributes:
        server: model, rule, ids: a :class:`fastagg.integrations._server.AggregationServer`.
        last_report: what became of the last round.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    def __init__(
        self,
        rule: str | Aggregator,
        *,
        num_clients: int | None = None,
        partition_key: str = "partition-id",
        seed: int = 0,
        checkpoint_path: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1,
        resume_from: str | os.PathLike[str] | None = None,
        rule_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.partition_key = partition_key
        self.seed = seed
        self.resume_from = resume_from
        self.server = AggregationServer(
            rule,
            num_clients=num_clients,
            checkpoint_path=checkpoint_path,
            checkpoint_every=checkpoint_every,
            **(rule_options or {}),
        )
        self.last_report: RoundReport | None = None
        self._sent: Parameters | None = None  # the global model, as it is sent

    def __repr__(self) -> str:
        return (
            f"FastAggLegacyStrategy({self.server.rule_name!r}, num_clients="
            f"{self.server.num_clients}, accept_failures={self.accept_failures})"
        )

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """The model of the checkpoint, or the given one, or None: a client is asked for its."""
        if self.server.checkpoint_path is not None and not self.server.guard.install():
            _LOG.warning("not in the main thread: SIGINT and SIGTERM write no last checkpoint")
        if self.resume_from is None:
            return super().initialize_parameters(client_manager)
        self.server.resume(self.resume_from)
        _LOG.info("resuming after round %d", self.server.rounds)
        return self._model()

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """The instructions of a round; remembers the model and who is asked."""
        if self._sent is None or parameters is not self._sent:
            self.server.set_model(_arrays(parameters))
            self._sent = None
        config = {} if self.on_fit_config_fn is None else self.on_fit_config_fn(server_round)
        least = max(self.min_available_clients, self.min_fit_clients)
        client_manager.wait_for(least, timeout=_A_DAY)
        proxies = client_manager.all()
        count, _ = self.num_fit_clients(len(proxies))
        asked = self.server.sample(list(proxies), count, self.seed)
        self.server.open_round(asked)
        fit_ins = FitIns(self._model(), config)
        return [(proxies[cid], fit_ins) for cid in asked]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[Failure],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """The new model, None if it stays, and the aggregated metrics of those who count."""
        for failure in failures:
            _LOG.info("\t> Received failure: %s", _reason(failure))
        if failures and not self.accept_failures:
            _LOG.info("\tnothing is aggregated: there are failures, and accept_failures is False")
            results = []
        answers = [self._read(proxy.cid, result) for proxy, result in results]
        report = self.server.close_round(answers)
        self.last_report = report
        for line in report.lines():
            _LOG.info("\t%s", line)
        metrics: dict[str, Scalar] = {}
        if self.fit_metrics_aggregation_fn is not None:
            ids = report.ids
            used = sorted((ids[p.cid], r) for p, r in results if p.cid in ids)
            metrics = self.fit_metrics_aggregation_fn(
                [(r.num_examples, r.metrics) for _, r in used]
            )
        if not report.active:
            return None, metrics
        self._sent = None
        return self._model(), metrics

    def _model(self) -> Parameters:
        """The global model, as it is sent; the same object until it changes."""
        if self._sent is None:
            self._sent = Parameters(list(self.server.arrays().values()), tensor_type=_NUMPY)
        return self._sent

    def _read(self, cid: str, result: FitRes) -> Answer:
        """The answer in a result, or why there is none."""
        if result.parameters.tensor_type != _NUMPY:
            got = result.parameters.tensor_type
            return Answer(cid, {}, problem=f"parameters: expected tensor_type {_NUMPY}, got {got}")
        if result.num_examples < 0:
            problem = f"num_examples: expected at least 0, got {result.num_examples}"
            return Answer(cid, {}, problem=problem)
        partition = (result.metrics or {}).get(self.partition_key)
        return Answer(cid, _arrays(result.parameters), partition)


def _arrays(parameters: Parameters) -> dict[str, bytes]:
    """The tensors by their position, which is all that they have for a name."""
    return {str(index): tensor for index, tensor in enumerate(parameters.tensors)}


def _reason(failure: Failure) -> str:
    if isinstance(failure, BaseException):
        return repr(failure)
    proxy, result = failure
    return f"client {proxy.cid}: {result.status}"
