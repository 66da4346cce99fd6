# SPDX-License-Identifier: Apache-2.0
"""The strategy for Flower's message API."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.serverapp.strategy.strategy_utils import log_strategy_start_info

from fastagg.aggregator import Aggregator
from fastagg.integrations._empty_rounds import close_and_note
from fastagg.integrations._flower_common import (
    IdFn,
    answer_with_id,
    check_wrappers,
    close_missed_round,
    id_source,
    log_changes,
    log_report,
    log_weighing,
    save_last,
    settle_round,
    wait_for_nodes,
)
from fastagg.integrations._flower_late import LateReplies
from fastagg.integrations._flower_metrics import MetricsFn, combine_metrics, weight_problem
from fastagg.integrations._flower_senders import from_those_asked
from fastagg.integrations._hosted_rule import check_option_names
from fastagg.integrations._report import Answer, RoundReport
from fastagg.integrations._server import AggregationServer
from fastagg.integrations._untrusted import cut
from fastagg.options import read_positive
from fastagg.updates.roles import Roles

_LOG = logging.getLogger("flwr")
_NUMPY = "numpy.ndarray"  # Flower's name for arrays that are serialized as .npy files

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class FastAggStrategy(FedAvg):
    """A strategy for ``flwr.serverapp`` that aggregates with a rule of fastagg.

    Clients need one change: they should report their partition in the training metrics, as
    ``"partition-id": context.node_config["partition-id"]``, so that rules with a memory recognize
    them. A client that does not report it is known by its node id, which changes with every
    connection unless SuperNodes are authenticated. A partition belongs to the first node that
    reports it, until this node has left.

    A client that was asked and did not answer is absent, whatever the reason: it crashed, was late,
    or answered with an error. (With ``staleness`` and ``max_staleness``, a late reply counts.) An
    answer is rejected and logged if it has wrong names, shapes or dtypes, NaN, or no finite
    ``num-examples``, if it comes from a node that was not asked, or if it claims the partition of
    another node. The round continues without it. If no answer is left, the model does not change,
    unless the rule then applies what it remembers (``mifa``); ``min_answers=1`` prevents that.

    Each metric is averaged, with the weights ``num-examples``, over the clients that sent a finite
    number for it; the log names the others. Metrics that fewer than half of the replies have are
    left out. Updates have these weights, too, as in Flower's ``FedAvg``, if the rule takes weights
    of a round (``weighted``).

    Integer and bool arrays keep the server's values, dtype and shape. Running statistics of
    normalisation layers, which are found by their names, become the mean of those of the active
    clients; an answer is rejected if they are too far away, or a variance is negative. The option
    ``roles`` says otherwise, by patterns of names. The server computes in float32 on the CPU.

    Args:
        rule: the name of a rule, or an aggregator made with ``nonfinite="drop"``.
        num_clients: K, the number of partitions; may be left out if ``rule`` is an aggregator.
        max_clients: K grows, up to this number, when nodes need more ids than are free, or report
            partitions of K and more. None: such answers are rejected; ``server.grow`` may be called
            between rounds.
        fraction_train ... evaluate_metrics_aggr_fn: as for Flower's ``FedAvg``.
        partition_key: the metric with which clients report their partition, an int in [0, K).
        seed: seed of the sampling of nodes, which is a function of the seed, the round and the
            clients' ids.
        checkpoint_path: file for checkpoints of the run; its folder must exist. None writes none.
        checkpoint_every: number of rounds from one checkpoint to the next. A checkpoint that cannot
            be written is an error in the log, and tried again after the next round.
        checkpoint_keep: number of checkpoints to keep: ``checkpoint_path``, and the older ones with
            ".1", ".2", ... after its name.
        inbox_path: folder in which late replies that have arrived wait for the end of a round, with
            ``max_staleness``; made if it does not exist. They survive the process, and each counts
            exactly once in the model of ``checkpoint_path``. None: they wait in memory.
        node_timeout: seconds that a round waits for ``min_available_nodes`` nodes (or for
            ``min_train_nodes``, if these are more); then it goes on with those that are connected.
        min_answers: a round with fewer usable answers does not change the model.
        max_empty_rounds: number of rounds in a row without an active client after which the run
            ends with an error.
        ids: where client ids come from. "partition": from the clients' metrics; a node that reports
            none is assigned an id. "node": every node is assigned one. Or a function of node id and
            metrics that returns an int in [0, K), for instance from a list of the nodes' keys.
        release_after: an id goes to another node when its own has not been connected for more than
            this number of rounds; 0: when it is not connected in this round. None: never, for
            authenticated SuperNodes, whose node ids are stable.
        selection: which of the connected nodes train in a round. "random": as in Flower, but as a
            function of ``seed``. "longest-absent": those that were asked the longest ago, nodes
            never asked first, ties at random (FedLaAvg).
        roles: an ordered mapping from names of arrays, or patterns as of :mod:`fnmatch`, to roles;
            the first match decides. "rule": the rule aggregates the array. "mean": the mean of the
            active clients' values, with the weights of their updates. "server": the server's
            values stay and are sent; answers may lack the array. "local": clients keep their own;
            the server does not send the array, and answers may lack it. Without a match, and with
            "auto": "server" for integers and bools, "mean" for names that end in running_mean or
            running_var, "rule" for the rest. For a module whose statistics have other names:
            ``roles=fastagg.FlatLayout.from_module(module, roles="auto").roles``.
        weighted: whether updates have the weights ``num-examples`` (``weighted_by_key``). None: if
            the rule takes weights of a round and has no ``client_weights``: "fedavg". The log of
            the first round says why they are not used. True: they replace the ``client_weights`` of
            active clients; the rule must take them. False: the rule's own weights count.
        **rule_options: options of the rule, if it is given by name: ``server_lr``,
            ``client_weights``, ``max_norm`` (a longer update is rejected), ... With ``staleness``
            and ``max_staleness``, replies that come after the end of their round count in a later
            one, with their age; so the ``timeout`` of :meth:`start` can be short.

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
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsFn | None = None,
        evaluate_metrics_aggr_fn: MetricsFn | None = None,
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
        weighted: bool | None = None,
        **rule_options: Any,
    ) -> None:
        super().__init__(
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=min_available_nodes,
            weighted_by_key=weighted_by_key,
            arrayrecord_key=arrayrecord_key,
            configrecord_key=configrecord_key,
            train_metrics_aggr_fn=train_metrics_aggr_fn,
            evaluate_metrics_aggr_fn=evaluate_metrics_aggr_fn,
        )
        # Flower puts its own function in the place of None.
        self._train_metrics_fn = train_metrics_aggr_fn
        self._evaluate_metrics_fn = evaluate_metrics_aggr_fn
        self.partition_key = partition_key
        self._id_fn = ids if callable(ids) else None
        self.seed = seed
        self.node_timeout = read_positive("node_timeout", node_timeout)
        check_option_names(rule, rule_options, host=FastAggStrategy)
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
            **rule_options,
        )
        self.last_report: RoundReport | None = None
        self._questions = LateReplies(self._keep_late)
        self._asked: dict[str, list[Message]] = {}  # the last messages of each type
        self._runs = False  # whether start runs the rounds
        self._record: ArrayRecord | None = None  # the global model in the form that is sent
        self._data: dict[str, bytes] = {}  # its arrays when it was made

    def summary(self) -> None:
        """Log the rule and the checkpoint, then Flower's summary."""
        _LOG.info("\t├──> Rule: %s, %d clients", self.server.rule_name, self.server.num_clients)
        if self.server.checkpoint_path is not None:
            _LOG.info(
                "\t├──> Checkpoint: %s, every %d rounds",
                os.fspath(self.server.checkpoint_path),
                self.server.checkpoint_every,
            )
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the training messages of a round; store the model and the nodes that are asked.

        Raises:
            ValueError: a wrapper runs the rounds, and the rule may not be wrapped, or has
                ``max_staleness``.
        """
        check_wrappers(self.server)
        if self.server.example.max_staleness and not self._runs:
            raise ValueError(
                "max_staleness: expected None or 0 if another loop than FastAggStrategy.start runs "
                "the rounds, such as that of a wrapper, got "
                f"{self.server.example.max_staleness}: only start asks for late replies, and they "
                "would not pass what a wrapper does to replies"
            )
        self._settle(arrays)
        close_missed_round(self.server, self._note)
        if self.fraction_train == 0.0:
            self.server.open_round(None)
            return []
        asked, connected = self._draw("train", grid, self.fraction_train, self.min_train_nodes)
        self.server.open_round(asked, connected)
        config["server-round"] = server_round
        return self._messages(MessageType.TRAIN, self._model(), config, asked)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the evaluation messages of a round, for nodes drawn as in training.

        A checkpoint that is due is written here: ``arrays`` is the model after all wrappers.
        """
        self._settle(arrays)
        if self.fraction_evaluate == 0.0:
            return []
        asked, _ = self._draw("evaluate", grid, self.fraction_evaluate, self.min_evaluate_nodes)
        config["server-round"] = server_round
        return self._messages(MessageType.EVALUATE, arrays, config, asked)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the new model, None if it did not change, and the metrics of active clients."""
        valid = self._answered("aggregate_train", MessageType.TRAIN, replies)
        answers = [self._read(message) for message in valid]
        log_weighing(self.server, self.weighted_by_key)
        report = close_and_note(lambda: self.server.close_round(answers, settled=False), self._note)
        late = {
            sender: RecordDict({name: MetricRecord(dict(m)) for name, m in note.items()})
            for sender, note in report.late_notes.items()
        }
        metrics = self._metrics(valid, report.ids, self._train_metrics_fn, late)
        self.server.history.add("train", report.round, metrics)
        if not report.moved:
            return None, metrics
        self._record = None
        return self._model(), metrics

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the combined metrics of the replies whose metrics are valid."""
        known = self.server.ids.known
        messages = self._answered("aggregate_evaluate", MessageType.EVALUATE, replies)
        ids = {
            _sender(message): known.get(_sender(message), self.server.num_clients)
            for message in messages
            if weight_problem(message.content.metric_records, self.weighted_by_key) is None
        }
        metrics = self._metrics(messages, ids, self._evaluate_metrics_fn)
        self.server.history.add("evaluate", self.server.rounds, metrics)
        return metrics

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        *,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> Result:
        """Run all rounds, as Flower's strategies do, or continue a run that was stopped.

        With a ``checkpoint_path``, SIGINT and SIGTERM write a last checkpoint before they take
        their usual effect. This works only in the main thread; Flower's simulation runs strategies
        in another one.

        Args:
            grid ... evaluate_fn: as in Flower.
            initial_arrays: the first model, with all arrays; not needed with ``resume_from``.
                Models that the run sends and returns lack "local" arrays.
            resume_from: checkpoint of a run with the same rule, options and number of clients;
                ``server_lr``, ``max_norm`` and ``min_active`` may be others, ``num_clients``
                larger. The run continues with the next round, up to round ``num_rounds``. If the
                last round was stopped before its evaluation, that comes first. With the same
                answers, the final model and all metrics are bit-identical to those of a run without
                interruption.

        Raises:
            RuntimeError: this strategy has already run, or ``max_empty_rounds`` rounds in a row, or
                all rounds of this run, had no active client. The checkpoint is written.
            ValueError: neither ``initial_arrays`` nor ``resume_from`` is given, or the checkpoint
                is from another run.
        """
        self._check_new()
        if resume_from is not None:
            self.resume(resume_from)
        elif initial_arrays is not None:
            self._take(initial_arrays)
        else:
            raise ValueError("initial_arrays, resume_from: expected one of them, got neither")
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        _LOG.info("Starting %s strategy:", type(self).__name__)
        log_strategy_start_info(num_rounds, self._model(), train_config, evaluate_config)
        self.summary()
        started = time.monotonic()
        first, self._runs = self.server.rounds + 1, True
        result = self._result()
        if self.server.checkpoint_path is not None and not self.server.guard.install():
            _LOG.warning("not in the main thread: SIGINT and SIGTERM will not write a checkpoint")
        try:
            if first > 1 and not result.evaluate_metrics_clientapp.get(first - 1):
                self._run_evaluation(first - 1, result, grid, timeout, evaluate_config)
            if evaluate_fn is not None and first - 1 not in result.evaluate_metrics_serverapp:
                self._evaluate(evaluate_fn, first - 1, result)
            for server_round in range(first, num_rounds + 1):
                _LOG.info("[ROUND %s/%s]", server_round, num_rounds)
                self._run_round(server_round, result, grid, timeout, train_config, evaluate_config)
                if evaluate_fn is not None:
                    self._evaluate(evaluate_fn, server_round, result)
            save_last(self.server)
            self.server.check_not_empty(since=first)
        finally:
            self._runs = False
            self.server.guard.uninstall()
            self.server.close()
        _LOG.info("Strategy execution finished in %.2fs", time.monotonic() - started)
        _LOG.info("Final results:")
        for line in str(result).splitlines():
            _LOG.info("\t%s", line)
        return result

    def _result(self) -> Result:
        """Return a result with the model, and the metrics of the rounds before a restart."""
        result, rounds = Result(arrays=self._model()), self.server.history.rounds
        for kind, records in (
            ("train", result.train_metrics_clientapp),
            ("evaluate", result.evaluate_metrics_clientapp),
            ("server", result.evaluate_metrics_serverapp),
        ):
            records.update({n: MetricRecord(metrics) for n, metrics in rounds[kind].items()})
        return result

    def _run_round(
        self,
        server_round: int,
        result: Result,
        grid: Grid,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> None:
        """Train and evaluate once; add the results to ``result``."""
        messages = self.configure_train(server_round, result.arrays, train_config, grid)
        replies = self._exchange(grid, messages, timeout, server_round)
        arrays, metrics = self.aggregate_train(server_round, replies)
        if arrays is not None:
            result.arrays = arrays
        if metrics is not None:
            _LOG.info("\t└──> Aggregated MetricRecord: %s", metrics)
            result.train_metrics_clientapp[server_round] = metrics
        self._run_evaluation(server_round, result, grid, timeout, evaluate_config)

    def _exchange(
        self, grid: Grid, messages: Iterable[Message], timeout: float, server_round: int
    ) -> Iterable[Message]:
        """Send the messages of a round and return the replies; late ones too, if they can count."""
        listed = list(messages)
        if not listed:
            return []
        if not self.server.takes_late_answers:
            return grid.send_and_receive(messages=listed, timeout=timeout)
        return self._questions.exchange(grid, listed, timeout, server_round, self.server.oldest)

    def _run_evaluation(
        self,
        server_round: int,
        result: Result,
        grid: Grid,
        timeout: float,
        evaluate_config: ConfigRecord,
    ) -> None:
        messages = self.configure_evaluate(server_round, result.arrays, evaluate_config, grid)
        if not messages:
            return
        replies = grid.send_and_receive(messages=messages, timeout=timeout)
        metrics = self.aggregate_evaluate(server_round, replies)
        if metrics is not None:
            _LOG.info("\t└──> Aggregated MetricRecord: %s", metrics)
            result.evaluate_metrics_clientapp[server_round] = metrics

    def _evaluate(self, evaluate_fn: EvaluateFn, server_round: int, result: Result) -> None:
        metrics: Any = evaluate_fn(server_round, result.arrays)  # a user may return anything
        if metrics is not None and not isinstance(metrics, MetricRecord):
            try:
                metrics = MetricRecord(metrics)
            except (TypeError, ValueError, AttributeError) as error:
                raise TypeError(
                    "evaluate_fn: expected a function that returns a MetricRecord or None, got "
                    f"{type(metrics).__name__}: {error}"
                ) from error
        _LOG.info("Global evaluation: %s", metrics)
        self.server.history.add("server", server_round, metrics)
        if metrics is not None:
            result.evaluate_metrics_serverapp[server_round] = metrics

    def _note(self, report: RoundReport) -> None:
        """Store and log the report of a round."""
        self.last_report = report
        log_report(report)

    def _settle(self, arrays: ArrayRecord) -> None:
        """Make ``arrays`` the server's model, and end the round before, if that is not done yet."""
        self._take(arrays)
        self.last_report = settle_round(self.server, self.last_report)

    def resume(self, path: str | os.PathLike[str]) -> ArrayRecord:
        """Load a checkpoint and return its model, for a wrapper that runs the rounds.

        ``start(resume_from=path)`` does this itself. A strategy within a wrapper, such as Flower's
        for differential privacy, is resumed before: ``wrapper.start(grid, strategy.resume(path),
        num_rounds=remaining)``. The wrapper counts rounds from 1.

        Raises:
            RuntimeError, FileNotFoundError, ValueError: as for :meth:`start`.
        """
        self._check_new()
        log_changes(self.server.resume(path))
        self._record = None
        return self._model()

    def _check_new(self) -> None:
        if self.server.rounds:
            raise RuntimeError(
                "this strategy has run already: make a new one, and pass resume_from to continue "
                "from a checkpoint"
            )

    def _take(self, arrays: ArrayRecord) -> None:
        """Make ``arrays`` the server's model, unless they are the record of :meth:`_model`.

        A subclass may have changed an array of that record, so arrays are compared, too.
        """
        if self._record is not None and arrays is self._record:
            data = {name: array.data for name, array in arrays.items()}
            if data.keys() == self._data.keys() and all(data[n] is self._data[n] for n in data):
                return
        for name, array in arrays.items():
            if array.stype != _NUMPY:
                raise TypeError(f"array {name!r}: expected stype {_NUMPY}, got {array.stype}")
        self.server.set_model({name: array.data for name, array in arrays.items()})
        self._record = None

    def _model(self) -> ArrayRecord:
        """Return the global model to send; the same object until the model changes."""
        if self._record is None:
            types = self.server.array_types()
            self._record, self._data = ArrayRecord(), self.server.arrays()
            for name, data in self._data.items():
                dtype, shape = types[name]
                self._record[name] = Array(dtype=dtype, shape=shape, stype=_NUMPY, data=data)
        return self._record

    def _draw(
        self, purpose: str, grid: Grid, fraction: float, least: int
    ) -> tuple[list[str], list[str]]:
        """Wait for nodes, at most ``node_timeout`` seconds; return drawn and connected ones."""
        enough = max(self.min_available_nodes, least)
        found = wait_for_nodes(grid.get_node_ids, enough, self.node_timeout)
        nodes = [str(node) for node in found]
        count = max(int(len(nodes) * fraction), least)
        asked = self.server.sample(nodes, count, self.seed, purpose)
        _LOG.info("configure_%s: Sampled %s nodes (out of %s)", purpose, len(asked), len(nodes))
        return asked, nodes

    def _messages(
        self, message_type: str, arrays: ArrayRecord, config: ConfigRecord, nodes: list[str]
    ) -> list[Message]:
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        messages = [
            Message(content=record, message_type=message_type, dst_node_id=int(node))
            for node in nodes
        ]
        self._asked[message_type] = messages  # the grid gives them ids
        return messages

    def _read(self, message: Message) -> Answer:
        """Return the answer in a reply; its ``problem`` is set if it cannot be used."""
        sender = _sender(message)
        records = message.content.array_records
        problem = weight_problem(message.content.metric_records, self.weighted_by_key)
        if len(records) != 1:
            problem = f"reply: expected one ArrayRecord, got {len(records)}"
        if problem is not None:
            return Answer(sender, {}, problem=problem)
        (arrays,) = records.values()
        (metrics,) = message.content.metric_records.values()
        wrong = sorted(name for name, array in arrays.items() if array.stype != _NUMPY)
        if wrong:
            return Answer(sender, {}, problem=f"arrays {wrong[:5]}: expected stype {_NUMPY}")
        data = {name: array.data for name, array in arrays.items()}
        weight = metrics[self.weighted_by_key]
        if self._id_fn is not None:
            answer = answer_with_id(sender, data, self._id_fn, int(sender), dict(metrics))
            return replace(answer, weight=weight)
        return Answer(sender, data, metrics.get(self.partition_key), weight=weight)

    def _keep_late(self, message: Message, number: int) -> None:
        """Keep a reply that came after the end of its round."""
        if message.has_error():
            _log_error(message)
            return
        records = message.content.metric_records
        note = {name: dict(record) for name, record in records.items()}
        self.server.put_late(replace(self._read(message), round=number, note=note))

    def _metrics(
        self,
        messages: list[Message],
        ids: dict[str, int],
        aggregate: MetricsFn | None,
        late: Mapping[str, RecordDict] | None = None,
    ) -> MetricRecord | None:
        """Combine the metrics of the senders in ``ids``, in the order of their ids.

        Args:
            messages: replies in time.
            ids: of the senders.
            aggregate: the user's function, if there is one.
            late: what is known of late replies that count, by sender. One with too many metrics
                may be missing.
        """
        contents = {_sender(message): message.content for message in messages} | dict(late or {})
        order = sorted(ids.keys() & contents.keys(), key=lambda sender: (ids[sender], sender))
        ignored = self.partition_key
        return combine_metrics(
            {s: contents[s] for s in order}, self.weighted_by_key, ignored, aggregate
        )

    def _answered(self, step: str, message_type: str, replies: Iterable[Message]) -> list[Message]:
        """Return the replies of nodes that were asked, without errors; log the others."""
        everything = list(replies)
        valid = [message for message in everything if not message.has_error()]
        errors = [message for message in everything if message.has_error()]
        _LOG.info("%s: Received %s results and %s failures", step, len(valid), len(errors))
        for message in errors:
            _log_error(message)
        return from_those_asked(self._asked.get(message_type, []), valid)


def _log_error(message: Message) -> None:
    _LOG.info(
        "\t> Received error in reply from node %s: %s",
        message.metadata.src_node_id,
        cut(str(message.error.reason)),
    )


def _sender(message: Message) -> str:
    return str(message.metadata.src_node_id)
