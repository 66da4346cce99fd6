# SPDX-License-Identifier: Apache-2.0
"""The adapter in pfl-research's simulated backend."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fastagg
from fastagg import CheckpointError, checkpoint

pytest.importorskip("pfl", reason="pfl is not installed (make test-flower installs it)")

from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import set_framework_module
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics

from fastagg.integrations.pfl import FastAggPostprocessor

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

USERS = 6


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        return nn.functional.mse_loss(self.layer(torch.as_tensor(x)), torch.as_tensor(y))

    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
        return {"loss": Weighted.from_unweighted(float(self.loss(x, y).detach()))}


def user_data(user: str) -> Dataset:
    rng = np.random.default_rng(int(user.removeprefix("u")))
    x = rng.standard_normal((8, 4)).astype(np.float32)
    y = rng.standard_normal((8, 2)).astype(np.float32)
    if user == "u5":
        y[0, 0] = np.nan
    return Dataset((torch.from_numpy(x), torch.from_numpy(y)), user_id=user)


def run(cohorts: list[list[str]], postprocessors: list[Any], folder: Path | None = None) -> Tensor:
    """Run federated averaging with these users and return the last model."""
    from pfl.internal.ops import pytorch_ops

    set_framework_module(pytorch_ops)
    torch.manual_seed(0)
    module = Linear()
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    order = iter([user for cohort in cohorts for user in cohort])
    train = FederatedDataset(user_data, lambda: next(order))
    backend = SimulatedBackend(train, train, postprocessors=postprocessors)
    algorithm = FederatedAveraging()
    for number, cohort in enumerate(cohorts):
        params = NNAlgorithmParams(
            central_num_iterations=len(cohorts),
            evaluation_frequency=100,
            train_cohort_size=len(cohort),
            val_cohort_size=0,
        )
        contexts, model, _ = algorithm.get_next_central_contexts(
            model,
            number,
            params,
            NNTrainHyperParams(local_num_epochs=2, local_learning_rate=0.1, local_batch_size=4),
            NNEvalHyperParams(local_batch_size=8),
        )
        (context,) = [c for c in contexts if c.population.name == "TRAIN"]
        stats, metrics = backend.gather_results(
            model=model, training_algorithm=algorithm, central_context=context
        )
        model, _ = algorithm.process_aggregated_statistics(context, metrics, model, stats)
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


class Recorder(FastAggPostprocessor):
    """Records what every user sent, in the form of pfl."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent: list[dict[str, Tensor]] = [{}]

    def postprocess_one_user(self, *, stats: Any, user_context: Any) -> Any:
        vector = torch.cat([value.reshape(-1).clone() for value in stats.values()])
        self.sent[-1][user_context.user_id] = vector
        return super().postprocess_one_user(stats=stats, user_context=user_context)

    def postprocess_server(self, **kwargs: Any) -> Any:
        self.sent.append({})
        return super().postprocess_server(**kwargs)


COHORTS = [["u3", "u0", "u1", "u2"], ["u2", "u0"], ["u4", "u3", "u5"], ["u0", "u1", "u4"]]


@pytest.mark.parametrize("rule", ["fdms", "mifa", "mimic", "geometric-median"])
def test_the_rule_replaces_the_sum(rule: str) -> None:
    recorder = Recorder(rule, num_clients=USERS)
    result = run(COHORTS, [recorder])
    # By hand: the same updates; ids are assigned in the order in which users are first seen.
    agg = fastagg.make(rule, num_clients=USERS, num_params=10, nonfinite="drop")
    ids = {"u0": 0, "u1": 1, "u2": 2, "u3": 3, "u4": 4, "u5": 5}
    torch.manual_seed(0)
    params = torch.cat([p.detach().reshape(-1) for p in Linear().parameters()])
    for sent in recorder.sent[:-1]:
        step = torch.zeros(10)
        report = agg.step(step, list(sent.values()), [ids[user] for user in sent])
        params = params + step
    assert torch.equal(result, params)
    assert recorder.last_report is not None
    assert recorder.last_report.active.tolist() == report.active.tolist() == [0, 1, 4]
    assert recorder._ids.known == ids


def test_fedavg_equals_the_average_of_pfl() -> None:
    cohorts = [["u3", "u0", "u1"], ["u2", "u4"]]
    ours = run(cohorts, [FastAggPostprocessor("fedavg", num_clients=USERS)])
    theirs = run(cohorts, [])
    # float32 sums in another order
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_user_with_nan_is_dropped_and_counted() -> None:
    used = FastAggPostprocessor("fedavg", num_clients=USERS)
    with_it = run([["u0", "u5", "u1"]], [used])
    assert used.last_report is not None
    assert used.last_report.rejected.tolist() == [2]
    assert torch.equal(
        with_it, run([["u0", "u1"]], [FastAggPostprocessor("fedavg", num_clients=USERS)])
    )
    assert torch.isnan(run([["u0", "u5", "u1"]], [])).any()  # the result of pfl alone


def test_state_survives_a_restart(tmp_path: Path) -> None:
    first = FastAggPostprocessor("mimic", num_clients=USERS)
    run(COHORTS[:2], [first])
    first.save(str(tmp_path))
    second = FastAggPostprocessor("mimic", num_clients=USERS)
    second.load(str(tmp_path))
    assert torch.equal(run(COHORTS[2:], [first]), run(COHORTS[2:], [second]))
    with pytest.raises(ValueError, match="rule 'mimic'"):
        FastAggPostprocessor("mifa", num_clients=USERS).load(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"shapes": None}, "shapes: expected dict"),
        ({"shapes": {"w": 3}}, "shapes: expected lists of sizes"),
        ({"shapes": {"w": [2**40]}}, "num_params was"),
        ({"ids": []}, "ids: expected dict"),
        ({"ids": {"known": {"a": 1, "b": 1}, "given": []}}, "expected distinct ids"),
        ({"rule_options": []}, "rule_options: expected dict"),
    ],
)
def test_a_forged_checkpoint_is_refused(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    first = FastAggPostprocessor("mimic", num_clients=USERS)
    run(COHORTS[:2], [first])
    first.save(str(tmp_path))
    file = tmp_path / "fastagg.safetensors"
    kind, content, state = checkpoint.read(file)
    content = {k: v for k, v in {**content, **changes}.items() if v is not None}
    checkpoint.write(file, kind, content, state)
    with pytest.raises(CheckpointError, match=match):
        FastAggPostprocessor("mimic", num_clients=USERS).load(str(tmp_path))


def test_unsupported_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="stale-models"):
        FastAggPostprocessor("stale-models", num_clients=USERS)
    with pytest.raises(TypeError, match="mu"):
        FastAggPostprocessor("mifa", num_clients=USERS, mu=1.0)
    with pytest.raises(ValueError, match="max_staleness and staleness"):
        FastAggPostprocessor("mifa", num_clients=USERS, staleness="constant", max_staleness=2)
    with pytest.raises(TypeError, match="num_params"):
        FastAggPostprocessor("mifa", num_clients=USERS, num_params=3)
    with pytest.raises(ValueError, match="every user once"):
        run([["u0", "u0"]], [FastAggPostprocessor("mifa", num_clients=USERS)])
    with pytest.raises(ValueError, match="num_clients"):
        run([["u0", "u1", "u2"]], [FastAggPostprocessor("mifa", num_clients=2)])
    with pytest.raises(ValueError, match="all 2 are taken"):
        run([["u0", "u1"], ["u2"]], [FastAggPostprocessor("mifa", num_clients=2)])
    with pytest.raises(RuntimeError, match="no state yet"):
        FastAggPostprocessor("mifa", num_clients=2).save(".")


def test_weighted_statistics_are_divided_by_their_weight() -> None:
    class Weigh:
        """Weights users as pfl does: multiplies the statistics by the weight."""

        def postprocess_one_user(self, *, stats: MappedVectorStatistics, user_context: Any) -> Any:
            from pfl.metrics import Metrics

            stats.reweight(4.0)
            return stats, Metrics()

        def postprocess_one_user_metrics(self, **kwargs: Any) -> Any:
            from pfl.metrics import Metrics

            return Metrics()

        postprocess_server_metrics = postprocess_one_user_metrics

        def postprocess_server(self, *, stats: Any, **kwargs: Any) -> Any:
            from pfl.metrics import Metrics

            return stats, Metrics()

    cohorts = [["u0", "u1", "u2"]]
    weighted = run(cohorts, [Weigh(), FastAggPostprocessor("fedavg", num_clients=USERS)])
    plain = run(cohorts, [FastAggPostprocessor("fedavg", num_clients=USERS)])
    assert torch.equal(weighted, plain)  # times four and back is exact


@pytest.fixture
def on_pytorch() -> None:
    from pfl.internal.ops import pytorch_ops

    set_framework_module(pytorch_ops)


def answer(post: FastAggPostprocessor, user: str, value: Tensor) -> None:
    stats = MappedVectorStatistics({"w": value}, weight=1.0)
    post.postprocess_one_user(stats=stats, user_context=SimpleNamespace(user_id=user))


def aggregate(post: FastAggPostprocessor) -> Tensor:
    stats = MappedVectorStatistics({"w": torch.zeros(3)}, weight=1.0)
    found, _ = post.postprocess_server(stats=stats, central_context=None, aggregate_metrics=None)
    return found["w"]


def test_statistics_of_another_shape_are_refused(on_pytorch: None) -> None:
    post = FastAggPostprocessor("fedavg", num_clients=USERS)
    answer(post, "u0", torch.ones(3))
    for wrong in (torch.ones(1), torch.ones(3, 1)):  # the first could be broadcast
        with pytest.raises(ValueError, match=r"^stats: expected the shapes \{'w': \[3\]\}, got"):
            answer(post, "u1", wrong)
    answer(post, "u1", torch.full((3,), 3.0))
    assert aggregate(post).tolist() == [2.0] * 3


def test_a_first_user_that_is_refused_leaves_no_shapes(on_pytorch: None) -> None:
    post = FastAggPostprocessor("fedavg", num_clients=USERS)
    with pytest.raises(ValueError, match="num_params"):
        answer(post, "u0", torch.ones(0))
    answer(post, "u0", torch.ones(3))
    assert aggregate(post).tolist() == [1.0] * 3


def test_loading_drops_a_cohort_that_was_interrupted(on_pytorch: None, tmp_path: Path) -> None:
    post = FastAggPostprocessor("fedavg", num_clients=USERS)
    answer(post, "u0", torch.ones(3))
    aggregate(post)
    post.save(str(tmp_path))
    answer(post, "u1", torch.full((3,), 4.0))  # then the training of another user fails
    post.load(str(tmp_path))
    answer(post, "u1", torch.full((3,), 2.0))
    assert aggregate(post).tolist() == [2.0] * 3


def test_a_cohort_is_over_after_an_exception(on_pytorch: None) -> None:
    post = FastAggPostprocessor("mifa", num_clients=1)
    for user, refused in (("u0", False), ("u1", True), ("u0", False)):
        answer(post, user, torch.full((3,), 5.0))
        if refused:
            with pytest.raises(ValueError, match="all 1 are taken"):
                aggregate(post)
        else:
            assert aggregate(post).tolist() == [5.0] * 3
