# SPDX-License-Identifier: Apache-2.0
"""The server in FLGO: real runs, with FLGO's clients and its simulator of their availability."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fastagg
from fastagg import CheckpointError

pytest.importorskip("flgo", reason="flgo is not installed (make test-flower installs it)")

import flgo
import flgo.algorithm.fedavg as fedavg
import flgo.algorithm.fedprox as fedprox
import flgo.algorithm.mifa
import flgo.algorithm.powerofchoice as powerofchoice
import flgo.benchmark.synthetic_regression as synthetic
from flgo.utils.fmodule import FModule

from fastagg.integrations.flgo import FastAggServer, Participation, _answer, with_rule

pytestmark = pytest.mark.flower

K, FEATURES, CLASSES = 8, 6, 3
RULES = [name for name in fastagg.available() if name not in ("scaffold", "mifa-client")]
OPTION = {
    "num_rounds": 4,
    "sample": "full",
    "num_steps": 2,
    "batch_size": 8,
    "learning_rate": 0.1,
    "num_parallels": 1,
    "no_log_console": True,
    "no_tqdm": True,
}
ABSENCE = {"availability": "HOMO-0.4", "connectivity": "HOMO-0.2"}


class Net(FModule):
    """A model with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 4)
        self.bn = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.bn(self.first(x))))


class MODEL:
    """In the form of FLGO's modules of models."""

    @staticmethod
    def init_local_module(party: Any) -> None:
        pass

    @staticmethod
    def init_global_module(party: Any) -> None:
        if "Server" in type(party).__name__:
            torch.manual_seed(0)
            party.model = Net()


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A task of FLGO with data of its own generator."""
    path = str(tmp_path_factory.mktemp("flgo") / "task")
    para = {"alpha": 1.0, "beta": 1.0, "num_clients": K, "mean_datavol": 40, "imbalance": 0.5}
    para |= {"dimension": FEATURES, "num_classes": CLASSES}
    visualize = synthetic.visualize
    synthetic.visualize = lambda *args: None  # it takes seconds
    try:
        flgo.gen_task({"benchmark": {"name": synthetic, "para": para}}, path)
    finally:
        synthetic.visualize = visualize
    return path


Start = Callable[..., Any]


@pytest.fixture
def start(task: str, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Call flgo.init for the task; the options are those above and what is given."""
    monkeypatch.setattr(sys, "argv", ["test"])  # FLGO reads options from there
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # FLGO sets it

    def init(algorithm: Any, *, scene: str = "horizontal", **option: Any) -> Any:
        return flgo.init(task, algorithm, {**OPTION, **option}, model=MODEL, scene=scene)

    return init


def recorded(algorithm: Any) -> Any:
    """Let the clients of an algorithm note what they send, and the server what it begins with."""

    class Client(algorithm.Client):
        def pack(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            package = super().pack(model, *args, **kwargs)
            sent = package.get("model") if isinstance(package, dict) else None
            if isinstance(sent, nn.Module):
                self.server.sent[-1][self.id] = copy.deepcopy(sent.state_dict())
            return package

    class Server(algorithm.Server):
        def initialize(self, *args: Any, **kwargs: Any) -> None:
            super().initialize(*args, **kwargs)
            self.sent: list[dict[int, dict[str, Tensor]]] = []
            self.models: list[dict[str, Tensor]] = [copy.deepcopy(self.model.state_dict())]
            self.reports: list[Any] = []
            self.participations: list[Participation] = []

        def iterate(self) -> Any:
            self.sent.append({})
            result = super().iterate()
            self.models.append(copy.deepcopy(self.model.state_dict()))
            self.reports.append(self.last_report)
            self.participations.append(self.last_participation)
            return result

    return type(algorithm.__name__, (), {"Server": Server, "Client": Client})


LAYOUT = fastagg.FlatLayout.from_module(Net(), roles="auto")


def check_by_hand(server: Any, rule: str, answered: list[set[int]]) -> fastagg.Aggregator:
    """Compare all rounds with steps of a rule over what these clients sent; return the rule."""
    agg = fastagg.make(rule, num_clients=K, num_params=LAYOUT.num_params, nonfinite="drop")
    assert len(server.sent) == len(answered)
    for number, clients in enumerate(answered):
        before, after = server.models[number], server.models[number + 1]
        sent = [server.sent[number][k] for k in sorted(clients)]
        params = LAYOUT.flatten(before)
        rows = [LAYOUT.flatten(state) - params for state in sent]
        report = agg.step(params, rows, sorted(clients))
        assert server.reports[number].active == tuple(report.active.tolist())
        assert torch.equal(LAYOUT.flatten(after), params)
        statistics = LAYOUT.flatten_statistics(before)
        if sent:
            statistics = torch.stack([LAYOUT.flatten_statistics(state) for state in sent]).mean(0)
        # the mean of at most K float32 values below 2, in another order; means near 0 cancel
        torch.testing.assert_close(
            LAYOUT.flatten_statistics(after), statistics, rtol=1e-6, atol=1e-6
        )
        assert torch.equal(after["bn.num_batches_tracked"], before["bn.num_batches_tracked"])
    state = server._core.aggregator.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in agg.state_dict().items())
    return agg


@pytest.mark.parametrize("rule", ["fdms", "mifa"])
def test_a_run_equals_steps_by_hand(start: Start, rule: str) -> None:
    server = start(recorded(with_rule(rule)), num_rounds=8, responsiveness="LN-10-20", **ABSENCE)
    tolerance = sorted(client._latency for client in server.clients)[K - 3]
    server.set_tolerance_for_latency(tolerance)
    server.run()
    rounds = server.participations
    # What FLGO itself says: a client that was not reached did not train, a late one did.
    for number, one in enumerate(rounds):
        assert one.drawn == tuple(range(K))
        parts = (one.unavailable, one.dropped, one.late, one.answered)
        assert sorted(k for part in parts for k in part) == [*range(K)]
        assert set(server.sent[number]) == {*one.late, *one.answered}
        assert set(server.reports[number].absent.values()) == set(range(K)) - {*one.answered}
    for name in Participation._fields:
        assert any(getattr(one, name) for one in rounds), name
    slow = {client.id for client in server.clients if client._latency > tolerance}
    assert slow == {k for one in rounds for k in one.late}
    check_by_hand(server, rule, [set(one.answered) for one in rounds])
    record = server.gv.logger.output["fastagg"]
    assert [tuple(entry["active"]) for entry in record] == [r.active for r in server.reports]


@pytest.mark.parametrize(
    ("aggregate", "options"), [("uniform", {}), ("other", {"client_weights": "datavol"})]
)
def test_fedavg_equals_that_of_flgo(start: Start, aggregate: str, options: Any) -> None:
    # FLGO's FedAvg makes models, and so draws random numbers that shuffle batches: all samples at
    # once do not depend on that.
    option = {"batch_size": -1, "aggregate": aggregate}
    theirs, ours = start(fedavg, **option), start(with_rule("fedavg", **options), **option)
    theirs.run()
    ours.run()
    assert ours.last_report.active == tuple(range(K))
    expected = theirs.model.state_dict()
    for name, value in ours.model.state_dict().items():
        if value.is_floating_point():  # FLGO scales and adds up the counters, too
            # float32 sums in another order, in 4 rounds of training
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_runs(start: Start, rule: str) -> None:
    server = start(with_rule(rule), num_rounds=3, eval_interval=-1, **ABSENCE)
    before = server.model
    kept = copy.deepcopy(before.state_dict())
    server.run()
    assert server.current_round == 4
    assert server.last_report.error is None and server.last_report.rejected == {}
    assert all(torch.equal(value, kept[name]) for name, value in before.state_dict().items())
    after = server.model.state_dict()
    assert not torch.equal(after["first.weight"], kept["first.weight"])
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert bool((after["bn.running_var"] > 0).all())


BAD: dict[str, Callable[[nn.Module], Any]] = {
    "NaN": lambda model: nn.init.constant_(model.last.bias, torch.nan),  # type: ignore[arg-type]
    "variance": lambda model: model.bn.running_var.fill_(-1.0),  # type: ignore[union-attr]
    "shape": lambda model: setattr(model, "last", nn.Linear(5, CLASSES)),
    "dtype": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "names": lambda model: setattr(model, "extra", nn.Linear(1, 1)),
}


@pytest.mark.parametrize("kind", [*BAD, "no model", "no answer", "tensor"])
def test_a_bad_answer_changes_nothing(start: Start, kind: str) -> None:
    algorithm = with_rule("mifa")

    class Client(algorithm.Client):  # type: ignore[name-defined,misc]
        def pack(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if self.id != 3:
                return super().pack(model)
            if kind == "no answer":
                return None
            if kind in BAD:
                BAD[kind](model)
                return super().pack(model)
            return {} if kind == "no model" else {"model": torch.zeros(3)}

    algorithm.Client = Client  # type: ignore[attr-defined]
    server = start(recorded(algorithm), num_rounds=3)
    server.run()
    assert all(list(report.rejected) == ["3"] for report in server.reports)
    assert server.participations[-1].answered == tuple(range(K))
    check_by_hand(server, "mifa", [set(range(K)) - {3}] * 3)


def test_a_second_answer_of_a_client_is_refused(start: Start) -> None:
    class Twice(fedavg.Server):
        def communicate(self, *args: Any, **kwargs: Any) -> Any:
            result = super().communicate(*args, **kwargs)
            self.received_clients.append(2)
            result["model"].append(result["model"][2])
            return result

    base = SimpleNamespace(Server=Twice, Client=fedavg.Client, __name__="twice")
    server = start(recorded(with_rule("fdms", base)), num_rounds=2)
    server.run()
    assert server.last_report.rejected == {"2": "answered 2 times"}
    check_by_hand(server, "fdms", [set(range(K)) - {2}] * 2)


def test_other_runs_of_the_process_do_not_drop_clients_twice(start: Start) -> None:
    algorithm = with_rule("fdms")
    for other in (fedavg, fedavg, algorithm):  # each decorates the methods of its classes again
        start(other)
    server = start(algorithm)
    start(fedavg)

    class Counting:
        draws = 0

        def rand(self) -> float:
            self.draws += 1
            return 0.5

    server.gv.clock.simulator = None  # it would draw new states when time goes by
    server.gv.simulator.client_states[0] = "offline"
    server.gv.simulator.random_module = Counting()
    server.iterate()
    assert server.last_participation.unavailable == (0,)
    assert server.last_participation.answered == tuple(range(1, K))
    assert server.gv.simulator.random_module.draws == K - 1


def test_clients_of_other_algorithms(start: Start) -> None:
    server = start(recorded(with_rule("mifa", fedprox)), algo_para=[0.5], **ABSENCE)
    assert all(client.mu == 0.5 for client in server.clients)
    assert server.sample_option == "full"  # FLGO's fedprox would draw with replacement
    assert server.option["algorithm"] == "fastagg_mifa_fedprox"
    server.run()
    check_by_hand(server, "mifa", [set(one.answered) for one in server.participations])
    assert server.participations[0].drawn == tuple(range(K))
    chosen = start(with_rule("fdms", powerofchoice), proportion=0.5)
    chosen.run()
    assert len(chosen.last_participation.drawn) == K // 2


def test_threads(start: Start) -> None:
    server = start(recorded(with_rule("mifa")), num_parallels=2, parallel_type="t", **ABSENCE)
    server.run()
    check_by_hand(server, "mifa", [set(one.answered) for one in server.participations])


def test_rounds_without_an_answer(start: Start) -> None:
    server = start(with_rule("fedavg", max_empty_rounds=5), connectivity="HOMO-1.0")
    before = copy.deepcopy(server.model.state_dict())
    with pytest.raises(RuntimeError, match="max_empty_rounds: 5 rounds"):
        server.run()
    assert server.current_round == 1
    assert server.last_participation.answered == ()
    assert server.last_report.round == 5
    assert all(
        torch.equal(before[name], value) for name, value in server.model.state_dict().items()
    )
    few = start(with_rule("fedavg", min_answers=K + 1), num_rounds=1)
    few.run()
    assert "min_answers" in few.last_report.error
    assert all(torch.equal(before[name], value) for name, value in few.model.state_dict().items())


def test_a_memory_moves_the_model_without_answers(start: Start) -> None:
    server = start(recorded(with_rule("mifa")), num_rounds=3)
    server.iterate()
    server.gv.simulator.set_variable([*range(K)], "prob_drop", [1.0] * K)
    assert server.iterate() is True
    assert server.participations[-1].answered == ()
    check_by_hand(server, "mifa", [set(range(K)), set()])
    assert not torch.equal(server.models[1]["last.bias"], server.models[2]["last.bias"])


def test_save_and_load(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    first = start(recorded(with_rule("mifa", checkpoint_path=file)), num_rounds=3, **ABSENCE)
    first.run()
    saved = tmp_path / "saved.safetensors"
    first.save(saved)
    assert file.read_bytes() == saved.read_bytes()
    second = start(recorded(with_rule("mifa", server_lr=0.5)), num_rounds=2, **ABSENCE)
    with pytest.raises(ValueError, match="rule 'fdms'"):
        start(with_rule("fdms")).load(saved)
    torn = tmp_path / "torn"
    torn.write_bytes(saved.read_bytes()[:-1])
    before = copy.deepcopy(second.model.state_dict())
    with pytest.raises(CheckpointError):
        second.load(torn)
    assert all(
        torch.equal(before[name], value) for name, value in second.model.state_dict().items()
    )
    assert second.load(saved) == ["server_lr was 1.0, is 0.5"]
    for server in (first, second):  # the same answers from now on
        server._core.aggregator.server_lr = 1.0
        torch.manual_seed(5)
        server.gv.simulator.set_client_state([*range(K)], "idle")
        server.gv.simulator.random_module = np.random.RandomState(5)
        server.iterate()
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"sample": "md"}, "sample: .*'md'"),
        ({"aggregate": "weighted_com"}, "aggregate: .*'weighted_com'"),
        ({"num_parallels": 2, "parallel_type": "p"}, "parallel_type: .*'p'"),
        ({"load_checkpoint": "c"}, "load_checkpoint"),
        ({"scene": "hierarchical"}, "scene"),
    ],
)
def test_options_of_flgo_that_do_not_fit(option: Any, match: str) -> None:
    whole = {"scene": "horizontal", "sample": "full", "aggregate": "other", "num_parallels": 1}
    with pytest.raises(ValueError, match=match):
        with_rule("fedavg").Server({**whole, "load_checkpoint": "", **option})  # type: ignore[attr-defined]


def test_rules_and_algorithms_that_do_not_fit(start: Start) -> None:
    with pytest.raises(ValueError, match="scaffold"):
        with_rule("scaffold")
    with pytest.raises(ValueError, match="fdmss"):
        with_rule("fdmss")
    with pytest.raises(ValueError, match=r"^name: expected one of"):
        with_rule(fastagg.FedAvg(num_clients=K, num_params=3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_staleness and staleness, because FLGO drops"):
        with_rule("mifa", staleness="constant", max_staleness=2)
    with pytest.raises(TypeError, match="num_clients"):
        with_rule("mifa", num_clients=3)
    with pytest.raises(ValueError, match="iterate"):
        with_rule("fedavg", flgo.algorithm.mifa)
    with pytest.raises(TypeError, match="Server"):
        with_rule("fedavg", "fedavg")
    with pytest.raises(ValueError, match="mode 'client'"):
        start(with_rule("mimic", mode="client"))
    with pytest.raises(TypeError, match="mu"):
        start(with_rule("mifa", mu=1.0))
    with pytest.raises(ValueError, match="'local'"):
        start(with_rule("mifa", roles={"last.*": "local"}))
    with pytest.raises(RuntimeError, match="aggregate"):
        start(with_rule("mifa")).aggregate([])


def test_drawing_a_client_twice_is_an_error(start: Start) -> None:
    class Twice(fedavg.Server):
        def sample(self) -> list[int]:
            return [0, 1, 1]

    base = SimpleNamespace(Server=Twice, Client=fedavg.Client, __name__="twice")
    server = start(with_rule("mifa", base))
    with pytest.raises(ValueError, match="different clients"):
        server.iterate()
    assert server.last_report is None


def test_models_are_read_in_place() -> None:
    model = Net()
    arrays = _answer(0, model).arrays
    for name, value in model.state_dict().items():
        assert np.shares_memory(arrays[name], value.numpy())
    assert issubclass(with_rule("fdms").Server, FastAggServer)  # type: ignore[attr-defined]
