# SPDX-License-Identifier: Apache-2.0
"""fastagg's rules in NVIDIA FLARE: an aggregator for its recipes and for ScatterAndGather.

NVFlare's own aggregator adds up what arrives and knows nothing about clients that are absent.
:class:`FastAggAggregator` collects the answers of a round and gives them to a rule of fastagg, with
the global model and the same client ids in every round. What a round does with its answers is in
:mod:`fastagg.integrations._server`. It needs NVFlare: ``pip install 'fastagg[nvflare]'``.

Recipes use the controller FedAvg. It tells its aggregator neither the model nor whom it asked; both
are in the event that NVFlare fires when a client fetches its task.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fastagg.integrations._optional import require

require("nvflare", "nvflare", "fastagg.integrations.nvflare")

from nvflare.apis.client import Client  # noqa: E402
from nvflare.apis.dxo import DXO, DataKind, from_shareable  # noqa: E402
from nvflare.apis.event_type import EventType  # noqa: E402
from nvflare.apis.fl_constant import ReservedKey, ReturnCode, ServerCommandKey  # noqa: E402
from nvflare.apis.fl_context import FLContext  # noqa: E402
from nvflare.apis.shareable import Shareable  # noqa: E402
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType  # noqa: E402
from nvflare.app_common.abstract.model import ModelLearnable, ModelLearnableKey  # noqa: E402
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator  # noqa: E402
from nvflare.app_common.app_constant import AppConstants  # noqa: E402
from nvflare.app_common.app_event_type import AppEventType  # noqa: E402

from fastagg.integrations import _tensors  # noqa: E402
from fastagg.integrations._empty_rounds import EmptyRounds  # noqa: E402
from fastagg.integrations._npy import npy_header, read_header, view  # noqa: E402
from fastagg.integrations._report import Answer, RoundReport  # noqa: E402
from fastagg.integrations._server import AggregationServer  # noqa: E402
from fastagg.integrations._untrusted import (  # noqa: E402
    LONGEST,
    MOST_METRICS,
    brief,
    cut,
    is_finite,
)
from fastagg.integrations._wire import WireError, WireLayout  # noqa: E402
from fastagg.updates.roles import Roles  # noqa: E402

if TYPE_CHECKING:
    from nvflare.job_config.api import FedJob
    from nvflare.recipe.spec import Recipe

_KINDS = (DataKind.WEIGHTS.value, DataKind.WEIGHT_DIFF.value)
_NOT_OF_THE_RULE = {"num_params", *inspect.signature(AggregationServer).parameters} - {"rule"}
_PARAMS_TYPES = {_KINDS[0]: ParamsType.FULL, _KINDS[1]: ParamsType.DIFF}


def leave_out_of_job(job: Recipe | FedJob) -> None:
    """Tell a recipe or a job that fastagg is installed on the server.

    Otherwise NVFlare copies the Python files of fastagg into the job, without its kernels.

    Args:
        job: of which the aggregator is a part.
    """
    # A recipe has no public way to its job.
    getattr(job, "_job", job).set_app_packages(["fastagg"])


class FastAggAggregator(ModelAggregator):
    """Aggregates with a rule of fastagg, in NVFlare's recipes for FedAvg and in ScatterAndGather.

    A client is known by the name that NVFlare has authenticated. It keeps its id in the whole run
    and, with a checkpoint, in later ones. A client without a usable answer is absent.

    The job API stores the arguments as JSON, so they are plain values. Call
    :func:`leave_out_of_job` before the recipe or the job runs.

    Args:
        rule: the name of a rule. Not "scaffold", "mifa-client", nor "mimic" with
            ``mode="client"``: their clients exchange more than models with the server.
        num_clients: K, the number of all clients of the run; may be left out with ``clients``.
        rule_options: options of the rule. Not ``staleness`` and ``max_staleness``, because late
            answers never count here.
        clients: names of all clients; the id of a client is its place in this list, and others are
            rejected. None: a client is assigned an id at its first answer, and more than K names
            are rejected.
        expected_data_kind: what clients send, and what is returned: "WEIGHTS" (models) or
            "WEIGHT_DIFF" (the differences from the model of the round). Others are rejected.
        min_answers: a round with fewer usable answers does not change the model.
        max_empty_rounds: number of rounds in a row without an active client after which the job
            ends with an error.
        checkpoint_path: absolute path of a file on the server, in a folder that exists; None writes
            no checkpoints. One that cannot be written is an error in the log, and tried again
            after the next round.
        checkpoint_every: number of rounds from one checkpoint to the next.
        checkpoint_keep: number of checkpoints to keep: ``checkpoint_path``, and the older ones with
            ".1", ".2", ... after its name.
        resume: continue from the file ``checkpoint_path``, if there is one when the job starts.
            The model is that with which NVFlare starts.
        roles: patterns of names of arrays and their roles, as for :class:`fastagg.FlatLayout`.
            NVFlare sends all arrays; those with the roles "server" and "local" do not change.

    Attributes:
        last_report: the report of the last round; None before the first.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
    """

    def __init__(
        self,
        rule: str,
        num_clients: int | None = None,
        rule_options: dict[str, Any] | None = None,
        *,
        clients: list[str] | None = None,
        expected_data_kind: str = DataKind.WEIGHTS.value,
        min_answers: int = 0,
        max_empty_rounds: int = 10,
        checkpoint_path: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1,
        checkpoint_keep: int = 2,
        resume: bool = False,
        roles: Roles = "auto",
    ) -> None:
        super().__init__()
        # The job API writes the attributes with the names of the arguments into the job.
        self.rule = rule
        self.num_clients = num_clients
        self.rule_options = rule_options
        self.clients = clients
        self.expected_data_kind = _read_kind(expected_data_kind)
        self.min_answers = min_answers
        self.max_empty_rounds = max_empty_rounds
        self.checkpoint_path = _read_path(checkpoint_path)
        self.checkpoint_every = checkpoint_every
        self.checkpoint_keep = checkpoint_keep
        self.resume = resume
        self.roles = roles
        if not isinstance(rule, str):
            raise TypeError(f"rule: expected a name, got {type(rule).__name__}")
        if resume and checkpoint_path is None:
            raise ValueError("resume: expected a checkpoint_path with it, got none")
        self._places = _read_clients(clients, num_clients)
        self._core = AggregationServer(
            rule,
            num_clients=num_clients if self._places is None else len(self._places),
            checkpoint_every=checkpoint_every,
            checkpoint_keep=checkpoint_keep,
            min_answers=min_answers,
            max_empty_rounds=max_empty_rounds,
            ids="node" if self._places is None else "trusted",
            release_after=None,
            roles=roles,
            returns_updates=self.expected_data_kind == DataKind.WEIGHT_DIFF.value,
            **_read_options(rule_options),
        )
        self._lock = threading.Lock()  # answers come in several threads; guards what follows
        self._answers: dict[str, Answer] = {}
        self._metrics: dict[str, dict[str, float | None]] = {}  # of the answers, in recipes
        self._task: Shareable | None = None  # what the controller FedAvg sends in this round
        self._fetched: set[str] = set()  # the clients that have fetched it
        self._ended: object = None  # the round that was aggregated and not reset yet
        self._resumed = False  # whether the next round is the first after a checkpoint
        self.last_report: RoundReport | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Open the checkpoint when the job starts; write one that is due when it ends.

        A checkpoint that cannot be used, or has no folder, ends the job. When a client fetches its
        task, remember the client and the model.
        """
        super().handle_event(event_type, fl_ctx)
        if event_type == AppEventType.BEFORE_TRAIN_TASK:
            fetching = _fetching(fl_ctx)
            with self._lock:
                self._task = fl_ctx.get_prop(AppConstants.TRAIN_SHAREABLE)
                self._fetched |= fetching
        if event_type not in (EventType.START_RUN, EventType.END_RUN):
            return
        try:
            with self._lock:
                if event_type == EventType.START_RUN:
                    self._start(fl_ctx)
                else:
                    self._core.save_if_due()
        except (OSError, TypeError, ValueError) as error:  # NVFlare would log it and go on
            self.system_panic(f"{type(self).__name__}: {error}", fl_ctx)

    def accept(self, shareable: Shareable, fl_ctx: FLContext) -> bool:
        """Take the answer of a client; its arrays are copied.

        Returns:
            Whether the answer counts for the round. False, with the reason in the log: it is of
            another round, a second one of a client, of a client that is not among ``clients``, or
            it does not have the names, shapes and dtypes of the model. What shows only beside the
            other answers, or is a matter of values (NaN), is in the report of the round.
        """
        try:
            with self._lock:
                self._take(shareable, fl_ctx)
        except Exception as error:  # NVFlare would end the task, and with it the job
            self.log_warning(fl_ctx, f"rejected {_text(error)}")
            return False
        return True

    def aggregate(self, fl_ctx: FLContext) -> Shareable:
        """Run the rule's step on the answers of the round, and write a checkpoint if one is due.

        Returns:
            "WEIGHTS": the new model with all its arrays, or the old one if the round changed
            nothing. "WEIGHT_DIFF": the differences of the arrays that the round changed. Both are
            arrays or tensors like those of the global model in ``fl_ctx``.

        Raises:
            ValueError: ``fl_ctx`` has no global model, or one that cannot be aggregated.
            RuntimeError: this is the last of ``max_empty_rounds`` rounds without an active client.
        """
        try:
            with self._lock:
                base = _global_model(fl_ctx)
                self._ended = fl_ctx.get_prop(AppConstants.CURRENT_ROUND)
                report, data = self._close(base, self._asked(fl_ctx), fl_ctx)
        except EmptyRounds as error:
            self._log(error.report, fl_ctx)
            raise
        self._log(report, fl_ctx)
        return DXO(DataKind(self.expected_data_kind), data=data).to_shareable()

    def reset(self, fl_ctx: FLContext) -> None:
        """Begin another round: forget the answers that came after the last one was aggregated."""
        self.reset_stats()

    def reset_stats(self) -> None:
        """Begin another round, in recipes; the same as :meth:`reset`."""
        with self._lock:
            self._answers, self._metrics, self._ended = {}, {}, None
            self._task, self._fetched = None, set()

    def accept_model(self, model: FLModel) -> None:
        """Take the answer of a client in a recipe; its arrays are copied.

        Args:
            model: as the controller FedAvg gives it, with the client's name in
                ``meta["client_name"]``.

        Raises:
            ValueError: the answer does not count, for one of the reasons of :meth:`accept`. The
                controller writes it to the log.
        """
        sender = (model.meta or {}).get("client_name")
        if not isinstance(sender, str) or not sender:
            raise ValueError(f"meta: expected the client's name, got {sender!r:.100}")
        with self._lock:
            if not self._core.has_model:
                self._set_base(self._task_model(), self.fl_ctx)
            self._store(sender, lambda: self._read_model(model))
            self._metrics[sender] = _read_metrics(model.metrics)

    def aggregate_model(self) -> FLModel:
        """Run the rule's step in a recipe; see :meth:`aggregate`.

        Returns:
            The new model or its differences, with the mean of each metric over the active clients
            that sent a finite number for it. Metrics that fewer than half of them have, and all but
            the first 1000 of a client, are left out.

        Raises:
            RuntimeError: this is the last of ``max_empty_rounds`` rounds without an active client,
                or no client has fetched the model in this round.
            ValueError: the model cannot be aggregated.
        """
        try:
            with self._lock:
                base = self._task_model()
                report, data = self._close(base, set(self._places or self._fetched), self.fl_ctx)
                names = sorted(report.ids)
                metrics = _mean_metrics([self._metrics.get(name, {}) for name in names])
        except EmptyRounds as error:
            self._log(error.report, self.fl_ctx)
            raise
        self._log(report, self.fl_ctx)
        return FLModel(_PARAMS_TYPES[self.expected_data_kind], data, metrics=metrics)

    def _start(self, fl_ctx: FLContext) -> None:
        """Continue from the checkpoint, and let later rounds replace it only if that worked."""
        path = self.checkpoint_path
        if path is None:
            return
        if not os.path.isdir(os.path.dirname(path)):
            raise FileNotFoundError(f"checkpoint_path: there is no folder for {path}")
        if self.resume and os.path.exists(path):
            self._resume(path, fl_ctx)
        elif self.resume:
            self.log_info(fl_ctx, f"there is no checkpoint {path}: the rule starts afresh")
        self._core.checkpoint_path = path

    def _resume(self, path: str, fl_ctx: FLContext) -> None:
        changed = self._core.resume(path)
        if self._places is not None:
            for name, client in self._core.ids.known.items():
                if self._places.get(name) != client:
                    raise ValueError(
                        f"clients: expected the ids of the run before, in which {name!r} was "
                        f"client {client}, got {self._places.get(name)}"
                    )
        self._resumed = True
        self.log_info(fl_ctx, f"continues {path} after {self._core.rounds} rounds")
        for change in changed:
            self.log_info(fl_ctx, change)

    def _take(self, shareable: Shareable, fl_ctx: FLContext) -> None:
        """Store an answer; ValueError if it does not count."""
        sender = _sender(shareable)
        current = fl_ctx.get_prop(AppConstants.CURRENT_ROUND)
        sent = shareable.get_cookie(AppConstants.CONTRIBUTION_ROUND)
        if type(sent) is not int or sent != current:
            raise ValueError(f"{sender}: expected an answer for round {current}, got {brief(sent)}")
        if sent == self._ended:
            raise ValueError(f"{sender}: late: round {current} has ended")
        if not self._core.has_model:
            self._set_base(_global_model(fl_ctx), fl_ctx)
        self._store(sender, lambda: self._read(shareable))

    def _store(self, sender: str, read: Callable[[], dict[str, bytes]]) -> None:
        """Store the first answer of a client in a round; ValueError if it does not count.

        Args:
            sender: the client's name, which NVFlare has authenticated.
            read: returns the arrays; an exception says what is wrong with them.
        """
        if sender in self._answers:
            raise ValueError(f"{sender}: has answered in this round already")
        if self._places is not None and sender not in self._places:
            raise ValueError(f"{sender}: expected one of the names in clients")
        try:
            arrays = read()
        except Exception as error:
            self._answers[sender] = Answer(sender, {}, problem=_text(error))
            raise ValueError(f"{sender}: {_text(error)}") from error
        partition = None if self._places is None else self._places[sender]
        is_update = self.expected_data_kind == DataKind.WEIGHT_DIFF.value
        self._answers[sender] = Answer(sender, arrays, partition, is_update=is_update)

    def _read(self, shareable: Shareable) -> dict[str, bytes]:
        """Return the arrays in an answer; an exception says what is wrong."""
        code = shareable.get_return_code()
        if code != ReturnCode.OK:
            raise ValueError(f"expected an answer, got the return code {brief(code)}")
        dxo = from_shareable(shareable)
        if dxo.data_kind != self.expected_data_kind:
            raise ValueError(
                f"expected_data_kind: expected {self.expected_data_kind}, got "
                f"{brief(dxo.data_kind)}"
            )
        return self._checked(dxo.data)

    def _read_model(self, model: FLModel) -> dict[str, bytes]:
        """Return the arrays in an answer of a recipe's client; an exception says what is wrong."""
        if model.params_type != _PARAMS_TYPES[self.expected_data_kind]:
            raise ValueError(
                f"expected_data_kind: expected {self.expected_data_kind}, got params_type "
                f"{model.params_type}"
            )
        return self._checked(model.params)

    def _checked(self, values: object) -> dict[str, bytes]:
        arrays = _pack(values, self._core.layout)
        self._core.layout.check(arrays)
        return arrays

    def _task_model(self) -> Mapping[str, Any]:
        """Return the model that the controller FedAvg has sent in this round.

        Raises:
            RuntimeError: no client has fetched it.
        """
        if self._task is None:
            raise RuntimeError(
                "FastAggAggregator: no client has fetched the model of this round; the controller "
                "must fire the event BEFORE_TRAIN_TASK, as FedAvg does"
            )
        return _weights(from_shareable(self._task).data)

    def _close(
        self, base: Mapping[str, Any], asked: set[str], fl_ctx: FLContext
    ) -> tuple[RoundReport, dict[str, Any]]:
        """Run the rule on the answers; return the report, and the new model or its differences.

        Args:
            base: the model that the clients started from.
            asked: names of the clients that were asked.
            fl_ctx: for the log.
        """
        self._set_base(base, fl_ctx)
        answers = [self._with_statistics(answer, base) for answer in self._answers.values()]
        self._answers = {}
        self._core.open_round(asked | {answer.sender for answer in answers})
        try:
            report = self.last_report = self._core.close_round(answers)
        except EmptyRounds as error:
            self.last_report = error.report
            raise
        return report, self._result(base, report.moved)

    def _set_base(self, base: Mapping[str, Any], fl_ctx: FLContext) -> None:
        """Make the model of the round the server's."""
        before = self._core.arrays() if self._resumed else None
        self._core.set_model(_pack(base, None))
        if before is not None and before != self._core.arrays():
            self.log_warning(
                fl_ctx,
                "the model with which NVFlare starts is not that of the checkpoint; the rule goes "
                "on with NVFlare's",
            )
        self._resumed = False

    def _asked(self, fl_ctx: FLContext) -> set[str]:
        """Return the names of the clients that were asked in this round."""
        if self._places is not None:
            return set(self._places)
        return _connected(fl_ctx) or set()

    def _with_statistics(self, answer: Answer, base: Mapping[str, Any]) -> Answer:
        """Return an answer with the values of running statistics in the place of differences."""
        if not answer.is_update or answer.problem is not None:
            return answer
        arrays = dict(answer.arrays)
        for slot in self._core.layout.slots:
            if slot.role == "mean":
                received = arrays[slot.name]
                assert isinstance(received, bytes)  # made by _pack
                change = view(received, read_header(received))
                with np.errstate(all="ignore"):  # what is not finite is rejected in the round
                    values = change + _array(slot.name, base[slot.name])
                arrays[slot.name] = _npy(values.astype(slot.dtype, copy=False))
        return Answer(answer.sender, arrays, answer.partition, is_update=True)

    def _result(self, base: Mapping[str, Any], moved: bool) -> dict[str, Any]:
        """Return the new model, or its difference, in the form of ``base``."""
        whole = self.expected_data_kind == DataKind.WEIGHTS.value
        if not moved:
            return dict(base) if whole else {}
        values = _tensors.unpack(self._core.layout, self._core.arrays())
        roles = {slot.name: slot.role for slot in self._core.layout.slots}
        result: dict[str, Any] = {}
        for name, old in base.items():
            if roles[name] in ("rule", "mean"):
                new = (
                    values[name].to(old.device) if isinstance(old, Tensor) else values[name].numpy()
                )
                result[name] = new if whole else new - old
            elif whole:
                result[name] = old
        return result

    def _log(self, report: RoundReport, fl_ctx: FLContext) -> None:
        """Write the report to NVFlare's log."""
        logs = {
            logging.INFO: self.log_info,
            logging.WARNING: self.log_warning,
            logging.ERROR: self.log_error,
        }
        for level, line in report.leveled_lines():
            logs[level](fl_ctx, line)


def _sender(shareable: Shareable) -> str:
    """Return the name of the client that sent an answer.

    NVFlare's server derives the client from the token of the connection and adds it to the answer.
    The other name, among the peer's properties, is what the client says of itself.

    Raises:
        ValueError: there is no such client, or the two names differ.
    """
    client = shareable.get_header(ServerCommandKey.FL_CLIENT)
    claimed = shareable.get_peer_prop(ReservedKey.IDENTITY_NAME, None)
    if not isinstance(client, Client) or not isinstance(client.name, str) or not client.name:
        raise ValueError(f"an answer that says it is of {brief(claimed)}: expected a known client")
    if claimed != client.name:
        raise ValueError(f"{client.name}: says it is {brief(claimed)}")
    return client.name


def _fetching(fl_ctx: FLContext) -> set[str]:
    """Return the name of the client that fetches its task, if it is the name of a client.

    The event has no other name than the one that the client says of itself, so it may be a wrong
    one, and of any type. It only says who is absent if no answer comes.
    """
    peer = fl_ctx.get_peer_context()
    name = None if peer is None else peer.get_identity_name()
    if not isinstance(name, str) or not name:
        return set()
    connected = _connected(fl_ctx)
    return {name} if connected is None or name in connected else set()


def _connected(fl_ctx: FLContext) -> set[str] | None:
    """Return the names of the clients that NVFlare's server knows; None without a server."""
    engine = fl_ctx.get_engine()
    return None if engine is None else {client.name for client in engine.get_clients()}


def _global_model(fl_ctx: FLContext) -> Mapping[str, Any]:
    """Return the model of the round: arrays or tensors by name.

    Raises:
        ValueError: there is none.
    """
    model = fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)
    return _weights(
        model.get(ModelLearnableKey.WEIGHTS) if isinstance(model, ModelLearnable) else model
    )


def _weights(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(
            f"{AppConstants.GLOBAL_MODEL}: expected a model with weights, got "
            f"{type(value).__name__}; the job needs a persistor that loads a model"
        )
    return value


def _read_metrics(metrics: object) -> dict[str, float | None]:
    """Return the first metrics of an answer by name; None for what is no finite number."""
    if not isinstance(metrics, Mapping):
        return {}
    found: dict[str, float | None] = {}
    for name, value in itertools.islice(metrics.items(), MOST_METRICS):
        if isinstance(name, str) and len(name) <= LONGEST:
            found[name] = float(value) if is_finite(value) else None
    return found


def _mean_metrics(sent: list[dict[str, float | None]]) -> dict[str, float] | None:
    """Return the mean of each metric over the clients that sent a finite number for it.

    Metrics that fewer than half of the clients have are left out.
    """
    counts = Counter(name for metrics in sent for name in metrics)
    means = {}
    for name in [name for name, count in counts.items() if 2 * count >= len(sent)]:
        values = [value for metrics in sent if (value := metrics.get(name)) is not None]
        if values:
            means[name] = _mean(values)
    return means or None


def _mean(values: list[float]) -> float:
    """Return the mean of finite numbers, which is finite."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # the sum is beyond the range of a float; the mean is not
        mean = sum(value / len(values) for value in values)
        return min(max(mean, min(values)), max(values))


def _pack(values: object, layout: WireLayout | None) -> dict[str, bytes]:
    """Return a model as arrays on the wire; the values are copied.

    Args:
        values: NumPy arrays or tensors by name.
        layout: the model that is expected; nothing larger is copied. None: any.

    Raises:
        WireError: ``values`` are not of this kind.
    """
    if not isinstance(values, Mapping):
        raise WireError(f"arrays: expected a dict, got {type(values).__name__}")
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray | np.generic | Tensor):
            raise WireError(
                f"array {brief(name)}: expected a NumPy array or a tensor, got "
                f"{type(value).__name__}"
            )
    if layout is not None:
        limit = sum(slot.size * np.dtype(slot.dtype).itemsize for slot in layout.slots)
        size = sum(value.nbytes for value in values.values())
        if size > limit:
            raise WireError(f"arrays: expected at most {limit} bytes, got {size}")
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    packed = _tensors.pack(tensors)
    return {
        name: packed[name] if name in packed else _npy(_array(name, value))
        for name, value in values.items()
    }


def _array(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Return an array or a tensor as an array in native byte order.

    Raises:
        WireError: it does not hold numbers or bools.
    """
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise WireError(f"array {name!r}: expected numbers or bools, got {array.dtype}")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    """Return an array of numbers as the bytes of a .npy file."""
    return npy_header(array.dtype.name, array.shape) + array.tobytes()


def _read_kind(value: object) -> str:
    kind = value.value if isinstance(value, DataKind) else value
    if kind not in _KINDS:
        raise ValueError(f"expected_data_kind: expected one of {_KINDS}, got {value!r}")
    return str(kind)


def _read_path(value: str | os.PathLike[str] | None) -> str | None:
    path = None if value is None else os.fspath(value)
    if path is not None and not os.path.isabs(path):
        raise ValueError(
            f"checkpoint_path: expected an absolute path, because each job has a folder of its "
            f"own, got {path!r}"
        )
    return path


def _read_clients(names: object, num_clients: int | None) -> dict[str, int] | None:
    """Return the id of each client, None if there is no list of clients."""
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"clients: expected a list of names, got {names!r}")
    if len(set(names)) < len(names) or not names:
        raise ValueError(f"clients: expected different names, at least one, got {names}")
    if num_clients not in (None, len(names)):
        raise ValueError(
            f"num_clients: expected {len(names)}, the number of clients, got {num_clients}; leave "
            "it out"
        )
    return {name: client for client, name in enumerate(names)}


def _read_options(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"rule_options: expected a dict of options by name, got {value!r}")
    taken = sorted(_NOT_OF_THE_RULE & value.keys())
    if taken:
        raise ValueError(f"rule_options: expected options of the rule, got {taken}")
    late = sorted({"staleness", "max_staleness"} & value.keys())
    if late:
        raise ValueError(
            f"rule_options: expected no options for late answers, because none counts, got {late}"
        )
    return value


def _text(error: Exception) -> str:
    """Return the message of an error, shortened, with its type unless it is a ValueError."""
    return cut(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
