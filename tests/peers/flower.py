# SPDX-License-Identifier: Apache-2.0
"""Put strategies with fastagg's rules in the place of Flower's, and run Flower's tests of them.

Flower's tests make a strategy and call its aggregation with results that no strategy asked for. A
stand-in takes the arguments of Flower's strategy; when it aggregates, it makes one of fastagg's
strategies for these results, starts a round with the clients that have sent them, and closes it.

These tests of Flower's strategies are not for fastagg, and files.py does not name them:

- ``server/strategy/aggregate_test.py``, ``serverapp/strategy/bulyan_test.py``: functions within
  Flower, and not strategies.
- ``server/strategy/fault_tolerant_fedavg_test.py``: a least share of the clients that were asked.
  fastagg's strategies have a least number, ``min_answers``.
- ``client_manager_test.py``, ``strategy_utils_test.py``: of Flower's own objects. The other tests
  import them.
- Of differential privacy, FedProx, q-FedAvg and trees: fastagg has no such strategies.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flwr.common
import numpy as np
from flwr.common import (
    ArrayRecord,
    ConfigRecord,
    Message,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.strategy import FedAvg

from fastagg.integrations.flower import FastAggLegacyStrategy, FastAggStrategy
from tests.peers.files import FLOWER_TESTS, have_files
from tests.peers.runs import run

Options = dict[str, Any]
# From Flower's arguments and the numbers of examples of the results: a rule and its options.
Rule = Callable[[Options, list[float]], tuple[str, Options]]


def _fedavg(_: Options, examples: list[float]) -> tuple[str, Options]:
    return "fedavg", {"client_weights": examples}


def _median(_: Options, examples: list[float]) -> tuple[str, Options]:
    return "median", {}


def _trimmed_mean(given: Options, examples: list[float]) -> tuple[str, Options]:
    return "trimmed-mean", {"num_byzantine": int(given.get("beta", 0.2) * len(examples))}


def _krum(given: Options, examples: list[float]) -> tuple[str, Options]:
    malicious = given.get("num_malicious_clients", given.get("num_malicious_nodes", 0))
    keep = given.get("num_clients_to_keep", given.get("num_nodes_to_select", 0))
    if keep == 0:
        return "krum", {"num_byzantine": malicious}
    return "multi-krum", {"num_byzantine": malicious, "keep": keep}


def _bulyan(given: Options, examples: list[float]) -> tuple[str, Options]:
    return "bulyan", {"num_byzantine": given["num_malicious_clients"]}


def _momentum(given: Options, examples: list[float]) -> tuple[str, Options]:
    rate, momentum = given.get("server_learning_rate", 1.0), given.get("server_momentum", 0.0)
    optimizer = {"name": "momentum", "beta_1": momentum} if momentum else "sgd"
    weights = {"client_weights": examples}
    return "fedavg", {"server_lr": rate, "server_optimizer": optimizer, **weights}


def _adaptive(name: str, eta: float, tau: float) -> Rule:
    """Return the rule of Flower's ``name`` with its defaults; other moments are ours by default."""

    def rule(given: Options, examples: list[float]) -> tuple[str, Options]:
        optimizer = {"name": name, "tau": given.get("tau", tau)}
        if name == "adam":
            optimizer["bias_correction"] = "flower"
        options = {"server_lr": given.get("eta", eta), "server_optimizer": optimizer}
        return "fedavg", {**options, "client_weights": examples}

    return rule


# Module and class of Flower's strategy, and the rule in its place.
LEGACY: list[tuple[str, str, Rule]] = [
    ("fedavg", "FedAvg", _fedavg),
    ("fedmedian", "FedMedian", _median),
    ("krum", "Krum", _krum),
    ("bulyan", "Bulyan", _bulyan),
    ("fedavgm", "FedAvgM", _momentum),
    ("fedadagrad", "FedAdagrad", _adaptive("adagrad", 0.1, 1e-9)),
]
MESSAGE: list[tuple[str, str, Rule]] = [
    ("fedmedian", "FedMedian", _median),
    ("fedtrimmedavg", "FedTrimmedAvg", _trimmed_mean),
    ("krum", "Krum", _krum),
    ("multikrum", "MultiKrum", _krum),
    ("fedavgm", "FedAvgM", _momentum),
    ("fedadagrad", "FedAdagrad", _adaptive("adagrad", 0.1, 1e-3)),
    ("fedadam", "FedAdam", _adaptive("adam", 0.1, 1e-3)),
    ("fedyogi", "FedYogi", _adaptive("yogi", 0.01, 1e-3)),
]

_LEGACY, _MESSAGE = "flwr/server/strategy", "flwr/serverapp/strategy"
_ROUNDED = "it compares bits of float64, and fastagg computes in float32"
# Reason, and the expected number of all columns, from which ours differs by rounding alone.
DIFFERENCES: dict[str, tuple[str, float]] = {
    f"{_LEGACY}/bulyan_test.py::test_aggregate_fit": (
        "it compares bits with a mean of models; fastagg adds the mean of the updates to the model",
        13.6 / 6,
    ),
    f"{_MESSAGE}/multikrum_test.py::test_aggregate_train_krum": (_ROUNDED, 0.7),
    f"{_MESSAGE}/multikrum_test.py::test_aggregate_train_multikrum": (_ROUNDED, 0.35),
}
# Models, updates and means are rounded to float32, by 2^-24 each; 8 such errors are allowed.
CLOSE = 8 * 2.0**-24
LEFT_OUT = {
    f"{_MESSAGE}/fedopt_test.py::test_compute_deltat_raises_error_{number}": (
        "of a method within Flower's FedOpt"
    )
    for number in (0, 1, 2)
}
_IMPORTED = {"client_manager_test.py", "strategy_utils_test.py"}
PASSING = 41
AGGREGATING = 20  # tests that aggregate, with those that differ; the others count clients
_results: dict[str, list[np.ndarray]] = {}  # the last model of each test


def _note(arrays: list[np.ndarray]) -> None:
    """Keep a result under the name of the test that runs."""
    _results[os.environ["PYTEST_CURRENT_TEST"].split(" ")[0]] = arrays


class _StandIn:
    """What both APIs share: arguments are kept; tests set some of them as attributes."""

    rule: Rule

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def _options(self, examples: list[float]) -> tuple[str, Options]:
        given = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return type(self).rule(given, examples)


class LegacyStandIn(_StandIn):
    """A strategy of ``flwr.server``."""

    _strategy: FastAggLegacyStrategy | None = None
    _parameters: Any = None

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Aggregate the results of clients 0, 1, ... in a round of their own."""
        proxies = {
            str(place): types.SimpleNamespace(cid=str(place)) for place in range(len(results))
        }
        if self._strategy is None:
            rule, options = self._options([float(result.num_examples) for _, result in results])
            self._strategy = FastAggLegacyStrategy(
                rule,
                num_clients=len(results),
                ids=lambda cid, _: int(cid),
                min_available_clients=len(results),
                min_fit_clients=len(results),
                rule_options={**options, "max_norm": None},  # Flower has no bound
            )
            first = parameters_to_ndarrays(results[0][1].parameters)
            zero = ndarrays_to_parameters([np.zeros_like(array) for array in first])
            given = getattr(self, "initial_parameters", None)
            self._parameters = zero if given is None else given
        manager: Any = types.SimpleNamespace(
            wait_for=lambda number, timeout: True,
            all=lambda: proxies,
            num_available=lambda: len(proxies),
        )
        self._strategy.configure_fit(server_round, self._parameters, manager)
        answers = [(proxies[str(place)], result) for place, (_, result) in enumerate(results)]
        self._parameters, metrics = self._strategy.aggregate_fit(server_round, answers, failures)
        _note(parameters_to_ndarrays(self._parameters))
        return self._parameters, metrics

    def num_fit_clients(self, num_available_clients: int) -> tuple[int, int]:
        """Return what our strategy, which inherits this from Flower's FedAvg, answers."""
        return self._sampling().num_fit_clients(num_available_clients)

    def num_evaluation_clients(self, num_available_clients: int) -> tuple[int, int]:
        """Return what our strategy, which inherits this from Flower's FedAvg, answers."""
        return self._sampling().num_evaluation_clients(num_available_clients)

    def _sampling(self) -> FedAvg:
        return FastAggLegacyStrategy("fedavg", num_clients=1, **vars(self))


class MessageStandIn(_StandIn):
    """A strategy of ``flwr.serverapp``."""

    _strategy: FastAggStrategy | None = None
    _arrays: ArrayRecord | None = None

    def aggregate_train(self, server_round: int, replies: list[Message]) -> Any:
        """Aggregate the replies of nodes 0, 1, ... in a round of their own."""
        contents = [reply.content for reply in replies]
        examples = [float(content["metrics"]["num-examples"]) for content in contents]
        if self._strategy is None:
            rule, options = self._options(examples)
            self._strategy = FastAggStrategy(
                rule,
                num_clients=len(replies),
                ids=lambda node, _: node,
                min_available_nodes=len(replies),
                min_train_nodes=len(replies),
                max_norm=None,  # Flower has no bound
                **options,
            )
            self._arrays = self._first(contents[0]["arrays"])
        grid: Any = types.SimpleNamespace(get_node_ids=lambda: range(len(replies)))
        assert self._arrays is not None
        list(self._strategy.configure_train(server_round, self._arrays, ConfigRecord(), grid))
        for place, reply in enumerate(replies):  # mocks, without an origin
            reply.metadata = types.SimpleNamespace(src_node_id=place)
        self._arrays, metrics = self._strategy.aggregate_train(server_round, replies)
        _note(self._arrays.to_numpy_ndarrays())
        return self._arrays, metrics

    def _first(self, like: ArrayRecord) -> ArrayRecord:
        """Return the model before the first round: the test's, else zeros of the replies' form."""
        given = getattr(self, "current_arrays", None)
        if given is None:
            return ArrayRecord([np.zeros_like(array) for array in like.to_numpy_ndarrays()])
        if isinstance(given, ArrayRecord):
            return given
        return ArrayRecord([given[name] for name in sorted(given)])


def tests(folder: Path, checkouts: Path | None) -> list[str]:
    """Run Flower's tests of strategies; return what is not as expected."""
    root = have_files(FLOWER_TESTS, folder, checkouts) / "framework/py"
    paths = [path.removeprefix("framework/py/") for path in FLOWER_TESTS.files]
    for path in paths:
        _add_to_package(root, path)
    # Flower makes messages only in a process that has been given these.
    identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    identity.run_id = identity.node_id = identity.task_id = 1
    # Later versions of Flower have no module of this name; its functions are in the package.
    sys.modules.setdefault("flwr.common.parameter", flwr.common)
    for package, base, table in (
        ("flwr.server.strategy", LegacyStandIn, LEGACY),
        ("flwr.serverapp.strategy", MessageStandIn, MESSAGE),
    ):
        for module, name, rule in table:
            stand_in = type(name, (base,), {"rule": staticmethod(rule)})
            setattr(importlib.import_module(f"{package}.{module}"), name, stand_in)
    problems = run(
        root,
        [path for path in paths if Path(path).name not in _IMPORTED],
        passing=PASSING,
        differences={name: reason for name, (reason, _) in DIFFERENCES.items()},
        left_out=LEFT_OUT,
    )
    for name, (reason, expected) in DIFFERENCES.items():
        print(f"  different, as expected: {name}: {reason}")
        (found,) = _results.get(name, [np.array(np.nan)])
        if not np.abs(found - expected).max() <= CLOSE * expected:
            problems.append(f"{name}: expected {expected} in all columns, got {found}")
    for name, reason in LEFT_OUT.items():
        print(f"  left out: {name}: {reason}")
    if len(_results) != AGGREGATING:
        problems.append(f"expected {AGGREGATING} tests that aggregate, got {len(_results)}")
    if not problems:
        print(f"Flower: {PASSING} tests pass with fastagg's strategies")
    return problems


def _add_to_package(root: Path, path: str) -> None:
    """Make a test file, which imports its neighbours, a module of the installed Flower."""
    folder = (root / path).parent
    package = ".".join(Path(path).parent.parts)
    search = importlib.import_module(package).__path__
    if str(folder) not in search:
        search.append(str(folder))
    # pytest finds a module's name by these; the packages themselves are imported already.
    while folder != root:
        (folder / "__init__.py").touch()
        folder = folder.parent
