# SPDX-License-Identifier: Apache-2.0
"""``num-examples`` as weights of updates, beside Flower's own FedAvg."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fastagg.integrations.flower import FastAggLegacyStrategy, FastAggStrategy

pytestmark = [
    pytest.mark.flower,
    pytest.mark.usefixtures("flower_identity"),
    pytest.mark.filterwarnings("ignore"),  # of Flower: its legacy strategies are deprecated
]

K, ROUNDS = 5, 4
COUNTS = [600, 1, 37, 250, 9_000]


class Nodes(Grid):
    """Nodes that answer at once; node k + 1 has ``COUNTS[k]`` examples, and more in each round."""

    def get_node_ids(self) -> list[int]:
        return [client + 1 for client in range(K)]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        return [self._answer(message) for message in messages]

    def _answer(self, message: Message) -> Message:
        client = message.metadata.dst_node_id - 1
        number = int(message.content["config"]["server-round"])
        rng = np.random.default_rng([number, client])
        arrays = {
            name: Array(np.abs(value + rng.standard_normal(value.shape).astype(np.float32)))
            for name, value in sent(message.content["arrays"]).items()
        }
        metrics = {"num-examples": number * COUNTS[client] + client, "partition-id": client}
        content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    def set_run(self, run: Any) -> None: ...
    def create_message(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    push_messages = pull_messages = create_message
    run = property(create_message)


def sent(record: Any) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


def first() -> ArrayRecord:
    rng = np.random.default_rng(1)
    shapes = {"w": (30, 7), "b": (7,), "norm.running_mean": (7,), "norm.running_var": (7,)}
    arrays = {name: np.abs(rng.standard_normal(shape)) for name, shape in shapes.items()}
    return ArrayRecord({name: Array(a.astype(np.float32)) for name, a in arrays.items()})


def trained(strategy: FedAvg) -> dict[str, np.ndarray]:
    result = strategy.start(Nodes(), first(), ROUNDS, train_config=ConfigRecord())
    return sent(result.arrays)


OURS = {"num_clients": K, "fraction_evaluate": 0.0, "max_norm": None}


def test_fedavg_equals_that_of_flower() -> None:
    theirs, ours = (
        trained(FedAvg(fraction_evaluate=0.0)),
        trained(FastAggStrategy("fedavg", **OURS)),
    )
    assert theirs.keys() == ours.keys()
    for name, expected in theirs.items():
        # four rounds with roundings of float32 (2^-24): of models, differences and means
        assert np.abs(ours[name] - expected).max() <= 1e-6 * np.abs(expected).max(), name
    plain = trained(FastAggStrategy("fedavg", weighted=False, **OURS))
    assert np.abs(plain["w"] - theirs["w"]).max() > 0.1  # the weights matter here


def test_the_older_api_equals_that_of_flower() -> None:
    rng = np.random.default_rng(0)
    model = rng.standard_normal(100).astype(np.float32)
    theirs = LegacyFedAvg()
    ours = FastAggLegacyStrategy("fedavg", num_clients=K, rule_options={"max_norm": None})
    ours.server.set_model(ours._arrays(ndarrays_to_parameters([model])))
    ours.server.open_round(f"n{client}" for client in range(K))
    results: list[Any] = []
    for client in range(K):
        sent_model = model + rng.standard_normal(100).astype(np.float32)
        parameters = ndarrays_to_parameters([sent_model])
        metrics = {"partition-id": client}
        fit = FitRes(Status(Code.OK, ""), parameters, COUNTS[client], metrics)
        results.append((type("Proxy", (), {"cid": f"n{client}"}), fit))
    expected, _ = theirs.aggregate_fit(1, results, [])
    found, _ = ours.aggregate_fit(1, results, [])
    assert expected is not None and found is not None
    (a,), (b,) = parameters_to_ndarrays(expected), parameters_to_ndarrays(found)
    assert np.abs(a - b).max() <= 1e-6 * np.abs(a).max()  # some roundings of float32


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        ("krum", {}, "it must withstand clients that lie"),
        ("mifa", {}, "constant shares"),
        ("fdms", {}, "it weighs absent clients as well"),
        ("fdms", {"client_weights": COUNTS}, "it has client_weights; weighted=True"),
        ("fedavg", {"client_weights": COUNTS}, "it has client_weights; weighted=True"),
    ],
)
def test_the_log_says_once_why_they_are_not_used(
    logged: list[str], rule: str, options: dict[str, Any], said: str
) -> None:
    trained(FastAggStrategy(rule, **OURS, **options))
    found = [line for line in logged if "num-examples weighs metrics only, not updates" in line]
    assert len(found) == 1 and said in found[0]


def test_the_log_says_nothing_of_a_choice(logged: list[str]) -> None:
    trained(FastAggStrategy("mifa", weighted=False, **OURS))
    trained(FastAggStrategy("fedavg", **OURS))
    assert not any("weighs metrics only" in line for line in logged)


def test_fdms_takes_them_in_place_of_its_client_weights() -> None:
    used = FastAggStrategy("fdms", weighted=True, client_weights=COUNTS, **OURS)
    trained(used)
    assert used.last_report is not None and used.last_report.step is not None
    last = np.array([ROUNDS * count + client for client, count in enumerate(COUNTS)])
    weights = used.last_report.step.weights.numpy()
    assert np.abs(weights - last / last.sum()).max() <= 2.0**-24  # rounded to float32


@pytest.mark.parametrize(
    ("rule", "weighted", "error"),
    [("krum", True, ValueError), ("fdms", True, ValueError), ("fedavg", 1, TypeError)],
)
def test_a_choice_that_cannot_be_is_refused(rule: str, weighted: Any, error: Any) -> None:
    with pytest.raises(error, match=r"^weighted: expected "):
        FastAggStrategy(rule, weighted=weighted, **OURS)
