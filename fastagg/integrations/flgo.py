# SPDX-License-Identifier: Apache-2.0
"""fastagg's rules in FLGO: a server for its simulated federations, where clients come and go.

FLGO's simulator decides which clients are available, drop out or are late. :func:`with_rule` gives
an algorithm of FLGO a server that aggregates with a rule, and that sees who was drawn, who was
reached and who answered. It needs FLGO: ``pip install 'fastagg[flgo]'``.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, ClassVar, NamedTuple

from torch import nn

from fastagg.integrations._optional import require

require("flgo", "flgo", "fastagg.integrations.flgo")

import flgo.algorithm.fedavg  # noqa: E402
import flgo.simulator.base  # noqa: E402
from flgo.algorithm.fedbase import BasicServer  # noqa: E402

from fastagg.integrations import _tensors  # noqa: E402
from fastagg.integrations._empty_rounds import close_and_note  # noqa: E402
from fastagg.integrations._hosted_rule import check_option_names, refuse_needy  # noqa: E402
from fastagg.integrations._report import Answer, RoundReport, listed  # noqa: E402
from fastagg.integrations._server import AggregationServer  # noqa: E402
from fastagg.registry import find  # noqa: E402
from fastagg.updates.layout import FlatLayout  # noqa: E402
from fastagg.updates.roles import Roles  # noqa: E402


class Participation(NamedTuple):
    """What FLGO's simulator did with the clients of a round; ids as in ``server.clients``.

    Attributes:
        drawn: those that the server drew.
        unavailable: drawn, but not available.
        dropped: available, but lost before they trained.
        late: trained, but answered after the server's tolerance for latency.
        answered: those whose answer came.
    """

    drawn: tuple[int, ...]
    unavailable: tuple[int, ...]
    dropped: tuple[int, ...]
    late: tuple[int, ...]
    answered: tuple[int, ...]

    def lines(self) -> list[str]:
        """Return who did not answer as lines of text, for a log."""
        groups = ("unavailable", "dropped", "late")
        return [f"{name}: {listed(getattr(self, name))}" for name in groups if getattr(self, name)]


class FastAggServer(BasicServer):
    """A server of FLGO that aggregates with a rule; :func:`with_rule` makes subclasses of it.

    A round takes the models of the clients that answered. Their updates are rows of the rule,
    running statistics become the mean of the clients', and integers keep the server's values. An
    answer that cannot be used changes neither model nor rule.

    Attributes:
        last_participation: who was drawn and answered in the last round; None before the first.
        last_report: the report of the last round; None before the first.

    Raises:
        ValueError: naming the option of FLGO that does not go with a rule, what was expected and
            what was given.
    """

    rule: ClassVar[str]
    rule_options: ClassVar[Mapping[str, Any]]
    roles: ClassVar[Roles]
    model: Any  # FLGO sets it, and the next one
    sample_option: str

    def __init__(self, option: dict[str, Any]) -> None:
        _check_option(option)
        super().__init__(option)
        self.last_participation: Participation | None = None
        self.last_report: RoundReport | None = None
        self._drawn: list[int] = []
        self._reached: list[int] = []

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Make the rule for the clients and the model; FLGO calls this before a run.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.
        """
        super().initialize(*args, **kwargs)
        if self.sample_option != self.option["sample"]:  # fedprox chooses "md", for example
            self.gv.logger.info(
                f"clients are drawn by the option sample, {self.option['sample']!r}, and not by "
                f"{self.sample_option!r}, which the algorithm would choose"
            )
            self.sample_option = self.option["sample"]
        if not isinstance(self.model, nn.Module):
            raise ValueError(
                f"model: expected one that the server has, got {type(self.model).__name__}"
            )
        layout = FlatLayout.from_module(self.model, roles=self.roles, convert=True)
        if "local" in layout.roles.values():
            raise ValueError(
                "roles: expected none that is 'local', because FLGO sends whole models; use an "
                "algorithm whose clients keep models of their own, such as ditto"
            )
        options = dict(self.rule_options)
        if options.get("client_weights") == "datavol":
            options["client_weights"] = [float(client.datavol) for client in self.clients]
        self._core = AggregationServer(
            self.rule,
            num_clients=self.num_clients,
            ids="trusted",
            release_after=None,
            roles=layout.roles,
            **options,
        )
        self._send_model()
        self._decorate()

    def iterate(self) -> bool:
        """Run a round of FLGO: draw clients, let them train, and aggregate with the rule.

        Returns:
            Whether FLGO counts the round: somebody answered, or the rule moved the model.

        Raises:
            RuntimeError: this is the last of ``max_empty_rounds`` rounds in a row without an active
                client.
        """
        self._send_model()
        self._drawn = self._reached = []
        self.selected_clients = self.sample()
        self._core.open_round(map(str, self._drawn))
        models = self.communicate(self.selected_clients)["model"]
        answered = [int(client) for client in self.received_clients]
        self.last_participation = Participation(
            tuple(self._drawn),
            _without(self._drawn, self.selected_clients),
            _without(self.selected_clients, self._reached),
            _without(self._reached, answered),
            tuple(answered),
        )
        answers = [_answer(*pair) for pair in zip(answered, models, strict=True)]
        report = close_and_note(lambda: self._core.close_round(answers), self._note)
        return bool(answers) or report.moved

    def _note(self, report: RoundReport) -> None:
        """Take the model of a round, if it is a new one, and store and log the report."""
        absent: dict[str, int | None] = {sender: int(sender) for sender in report.absent}
        self.last_report = report = replace(report, absent=absent)
        if report.moved:
            self._receive_model()
        assert self.last_participation is not None  # of this round
        self._log(self.last_participation, report)

    def aggregate(self, models: Sequence[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        """Raise an error: a rule needs to know whose models these are; :meth:`iterate` does."""
        raise RuntimeError("aggregate: the rule aggregates in iterate, which an algorithm calls")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model and the state of the rule to one file, atomically, without pickle.

        Raises:
            ValueError: an option of the rule cannot be stored.
            OSError: the folder does not exist or is not writable. An older file is unchanged.
        """
        self._send_model()
        self._core.save(path)

    def load(self, path: str | os.PathLike[str]) -> list[str]:
        """Continue with the model and the state of the rule that :meth:`save` wrote.

        Everything else of FLGO begins anew: its count of rounds, clock, simulator and random
        numbers. ``server_lr``, ``max_norm`` and ``min_active`` may be others than before, and there
        may be more clients.

        Returns:
            The options that are others than before, as text.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, or has another rule, other options, another model or
                more clients. Model and rule are unchanged.
        """
        with self._core.held():  # a signal must not leave the rule of one run, the model of another
            changed = self._core.resume(path)
            self._receive_model()
        return changed

    def _send_model(self) -> None:
        """Give the rule the model of FLGO, which others may have changed."""
        self._core.set_model(_tensors.pack(self.model.state_dict()))

    def _receive_model(self) -> None:
        """Replace the model of FLGO by the rule's. The old one is not changed: others may hold it.

        FLGO's own servers make a new model in each round, too.
        """
        self.model = copy.deepcopy(self.model)
        self.model.load_state_dict(_tensors.unpack(self._core.layout, self._core.arrays()))

    def _decorate(self) -> None:
        """Apply FLGO's decorators once to the methods of this object, around notes of their input.

        ``flgo.init`` decorates methods of the class, again for every run of a process and also for
        base classes. So in the second run of a process clients would be dropped twice, and a list
        of those that were not available would be lost.
        """
        sample, communicate, communicate_with = (
            _undecorated(getattr(type(self), name))
            for name in ("sample", "communicate", "communicate_with")
        )

        def draw(server: FastAggServer) -> list[int]:
            server._drawn = [int(client) for client in sample(server)]
            if len(set(server._drawn)) < len(server._drawn):
                raise ValueError(
                    f"sample: expected different clients, because a rule takes one row per client, "
                    f"got {server._drawn}"
                )
            return server._drawn

        def exchange(server: FastAggServer, clients: list[int], *args: Any, **kwargs: Any) -> Any:
            server._reached = [int(client) for client in clients]
            return communicate(server, clients, *args, **kwargs)

        def ask(server: FastAggServer, *args: Any, **kwargs: Any) -> dict[str, Any]:
            # FLGO makes a list of each entry, which must have the length of the other lists.
            return {"model": None, **(communicate_with(server, *args, **kwargs) or {})}

        simulated = flgo.simulator.base
        self.sample = MethodType(simulated.with_availability(draw), self)
        self.communicate = MethodType(simulated.with_dropout(exchange), self)
        self.communicate_with = MethodType(simulated.with_latency(ask), self)

    def _log(self, participation: Participation, report: RoundReport) -> None:
        """Write a round to FLGO's log, and to the record that FLGO saves as JSON after the run."""
        for line in participation.lines():
            self.gv.logger.info(line)
        for level, line in report.leveled_lines():
            self.gv.logger.log(level, line)
        entry: dict[str, Any] = {
            "active": list(report.active),
            "friends": report.friends,
            "rejected": report.rejected,
            "error": report.error,
        }
        self.gv.logger.write_var_into_output("fastagg", participation._asdict() | entry)


def with_rule(
    rule: str,
    algorithm: Any = flgo.algorithm.fedavg,
    *,
    roles: Roles = "auto",
    min_answers: int = 0,
    max_empty_rounds: int = 100,
    checkpoint_path: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    checkpoint_keep: int = 2,
    **options: Any,
) -> type:
    """Return an algorithm for ``flgo.init``: the clients of another one, and a rule on the server.

    ::

        algorithm = with_rule("fdms")
        runner = flgo.init("task", algorithm, option={"availability": "HOMO-0.5"})
        runner.run()

    It may be used in several runs; each has a state of its own. FLGO's option ``aggregate`` has no
    effect: updates count equally, unless the rule has ``client_weights``.

    Args:
        rule: name of a rule other than ``scaffold`` and ``mifa-client``, which need clients of
            their own.
        algorithm: module or class of FLGO with a ``Server`` and a ``Client``. The server must
            aggregate as FLGO's FedAvg does: as in fedavg, fedprox, moon, powerofchoice. How clients
            are drawn is FLGO's option ``sample``, also where the algorithm would change it.
        roles: patterns of names of arrays and their roles: "rule", "mean" or "server", as for
            :class:`fastagg.FlatLayout`. "auto" finds running statistics by the types of layers.
        min_answers: a round with fewer usable answers does not change the model.
        max_empty_rounds: number of rounds in a row without an active client after which the run
            ends with an error. FLGO does not count such rounds.
        checkpoint_path: file for checkpoints of model and rule, which the server's ``load`` takes;
            its folder must exist. None writes none.
        checkpoint_every: number of rounds from one checkpoint to the next.
        checkpoint_keep: number of checkpoints to keep: ``checkpoint_path``, and the older ones with
            ".1", ".2", ... after its name.
        **options: options of the rule, without ``staleness`` and ``max_staleness``: late answers
            never count. ``client_weights="datavol"`` weights clients by their number of samples, as
            FLGO does.

    Returns:
        A class with the attributes ``Server``, a :class:`FastAggServer`, and ``Client``. FLGO names
        files with results after it: ``fastagg_fdms_fedavg``.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
            ``flgo.init`` checks the values of the rule's options.
    """
    refuse_needy(rule)
    find(rule, [])  # an aggregator has a state, which runs would share
    check_option_names(rule, options, late="FLGO drops late answers, so that none counts")
    base = getattr(algorithm, "Server", None)
    if not isinstance(base, type) or not issubclass(base, BasicServer):
        raise TypeError(f"algorithm: expected one with a Server of FLGO, got {algorithm!r}")
    for method in ("iterate", "aggregate"):
        if getattr(base, method) is not getattr(BasicServer, method):
            raise ValueError(
                f"algorithm: expected a server with the {method} of FLGO's BasicServer, which the "
                f"rule replaces, but {algorithm.__name__} has its own"
            )
    attributes = {
        "rule": rule,
        "roles": roles,
        "rule_options": {
            "min_answers": min_answers,
            "max_empty_rounds": max_empty_rounds,
            "checkpoint_path": checkpoint_path,
            "checkpoint_every": checkpoint_every,
            "checkpoint_keep": checkpoint_keep,
            **options,
        },
    }
    # FLGO writes to the classes of an algorithm, so each algorithm has classes of its own.
    server = type("Server", (FastAggServer, base), attributes)
    client = type("Client", (algorithm.Client,), {})
    name = f"fastagg_{rule}_{algorithm.__name__.split('.')[-1]}"
    return type(name, (), {"Server": server, "Client": client})


def _check_option(option: Mapping[str, Any]) -> None:
    """Check that the options of a run of FLGO go with a rule.

    Raises:
        ValueError: one does not.
    """
    if option["scene"] != "horizontal":
        raise ValueError(f"scene: expected 'horizontal', got {option['scene']!r}")
    if "md" in option["sample"]:
        raise ValueError(
            "sample: expected 'uniform' or 'full', because a rule takes one row per client and "
            f"{option['sample']!r} draws clients several times"
        )
    if option["aggregate"] not in ("other", "uniform"):
        raise ValueError(
            "aggregate: expected 'other' or 'uniform', because the rule aggregates, got "
            f"{option['aggregate']!r}"
        )
    if option["num_parallels"] > 1 and option["parallel_type"] != "t":
        raise ValueError(
            "parallel_type: expected 't' (threads), because the server with its rule is not sent "
            f"to other processes, got {option['parallel_type']!r}"
        )
    if option["load_checkpoint"]:
        raise ValueError(
            "load_checkpoint: expected none, because FLGO's files lack the state of the rule; use "
            "checkpoint_path, and the server's load"
        )


def _answer(client: int, model: object) -> Answer:
    """Return the model that a client sent; its arrays are those of the model, not copies."""
    sender = str(client)
    if not isinstance(model, nn.Module):
        problem = f"expected a model, got {type(model).__name__}"
        return Answer(sender, {}, client, problem)
    try:
        arrays = {name: value.detach().cpu().numpy() for name, value in model.state_dict().items()}
    except TypeError as error:  # of a dtype that NumPy lacks, or sparse
        return Answer(sender, {}, client, str(error))
    return Answer(sender, arrays, client)


def _undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method without the decorators that ``flgo.init`` has added, if it was called."""
    method = inspect.unwrap(method)
    if method.__name__ != "sample_with_availability":  # the decorator that hides what it decorates
        return method
    return _undecorated(inspect.getclosurevars(method).nonlocals["sample"])


def _without(clients: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    """Return the clients that are not among the others."""
    return tuple(int(client) for client in clients if client not in set(others))
