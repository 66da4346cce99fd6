# SPDX-License-Identifier: Apache-2.0
"""The adapter for NVIDIA FLARE in jobs and recipes that NVFlare's simulator runs.

tests/pages/test_nvflare_page.py runs another job, with ``fdms`` and clients that are executors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastagg

pytest.importorskip("nvflare", reason="nvflare is not installed (make test-flower installs it)")

from tests.scripts import run_script

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CLIENT = """
import numpy as np
import nvflare.client as flare


def train(weights, site, number):
    rng = np.random.default_rng([site, number])
    return weights + rng.standard_normal(weights.shape).astype(np.float32)


def main():
    flare.init()
    site = int(flare.get_site_name().removeprefix("site-"))
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        params = {"numpy_key": train(model.params["numpy_key"], site, model.current_round)}
        if site == 2 and model.current_round == 1:
            params = {}  # nothing
        flare.send(flare.FLModel(params=params))


if __name__ == "__main__":
    main()
"""

# Three workflows, one after another: mifa with an absent client; fedavg; NVFlare's own aggregator.
JOB = """
from nvflare.app_common.aggregators.intime_accumulate_model_aggregator import (
    InTimeAccumulateWeightedAggregator,
)
from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.app_common.shareablegenerators.full_model_shareable_generator import (
    FullModelShareableGenerator,
)
from nvflare.app_common.workflows.scatter_and_gather import ScatterAndGather
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

from fastagg.integrations.nvflare import FastAggAggregator, leave_out_of_job

job = FedJob(name="three", min_clients=3)
leave_out_of_job(job)
job.to_server(FullModelShareableGenerator(), id="shareable_generator")
for name, aggregator, first, rounds in [
    ("mifa", FastAggAggregator("mifa", 3, rule_options={"client_weights": [1, 2, 4]}), 0, 3),
    ("fedavg", FastAggAggregator("fedavg", 3), 4, 1),
    ("theirs", InTimeAccumulateWeightedAggregator(expected_data_kind="WEIGHTS"), 4, 1),
]:
    job.to_server(aggregator, id=name)
    job.to_server(NPModelPersistor(model_name=name + ".npy"), id=name + "_persistor")
    job.to_server(
        ScatterAndGather(
            num_rounds=rounds,
            start_round=first,
            min_clients=1,
            wait_time_after_min_received=300,  # on a busy machine, clients start slowly
            persistor_id=name + "_persistor",
            aggregator_id=name,
            task_check_period=0.05,
        )
    )
job.to_clients(ScriptRunner(script="client.py", framework=FrameworkType.NUMPY))
raise SystemExit(job.simulator_run("run", n_clients=3, threads=3))
"""


def loop_of_clients(rule: str, rounds: dict[int, list[int]], **options: Any) -> np.ndarray:
    """Return the model after a loop with the clients that are active in each round."""
    names: dict[str, Any] = {"__name__": "client", "flare": None}
    exec(CLIENT.replace("import nvflare.client as flare", ""), names)
    agg = fastagg.make(rule, num_clients=3, num_params=9, **options)
    params = torch.arange(1.0, 10.0)  # the first model of NPModelPersistor
    for number, active in rounds.items():
        models = [names["train"](params.numpy(), client + 1, number) for client in active]
        agg.step(params, [torch.from_numpy(m) - params for m in models], active)
    return params.view(3, 3).numpy()


@pytest.mark.slow
def test_a_job_has_the_bits_of_a_loop(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT, encoding="utf-8")
    run_script(JOB, tmp_path, name="job.py")
    models = tmp_path / "run" / "server" / "simulate_job" / "models"
    found = {name: np.load(models / f"{name}.npy") for name in ("mifa", "fedavg", "theirs")}

    rounds = {0: [0, 1, 2], 1: [0, 2], 2: [0, 1, 2]}
    assert np.array_equal(found["mifa"], loop_of_clients("mifa", rounds, client_weights=[1, 2, 4]))
    assert np.array_equal(found["fedavg"], loop_of_clients("fedavg", {4: [0, 1, 2]}))
    # NVFlare averages models in float32 in the order of arrival, fastagg updates in float64.
    np.testing.assert_allclose(found["theirs"], found["fedavg"], rtol=1e-5)
    log = (tmp_path / "run" / "server" / "log.txt").read_text(encoding="utf-8")
    assert "rejected site-2: array" in log and "round 2: 2 active: 0, 2" in log


# The shape of NVFlare's hello-world: a recipe, and clients that use the Client API.
RECIPE = """
import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe import SimEnv

from fastagg.integrations.nvflare import FastAggAggregator, leave_out_of_job

recipe = NumpyFedAvgRecipe(
    name="hello",
    model=np.arange(1.0, 10.0, dtype=np.float32).reshape(3, 3).tolist(),
    min_clients=3,
    num_rounds=3,
    train_script="client.py",
    aggregator=FastAggAggregator("RULE", num_clients=3),
)
leave_out_of_job(recipe)
run = recipe.execute(SimEnv(num_clients=3, num_threads=3, workspace_root="run"))
print("status:", run.get_status())
"""


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fdms", "mifa"])
def test_a_recipe_runs_in_the_simulator(rule: str, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT, encoding="utf-8")
    run_script(RECIPE.replace("RULE", rule), tmp_path, name="job.py")
    (found,) = (tmp_path / "run").rglob("models/server.npy")
    rounds = {0: [0, 1, 2], 1: [0, 2], 2: [0, 1, 2]}  # site-2 sends nothing in round 1
    assert np.array_equal(np.load(found), loop_of_clients(rule, rounds))
    (log,) = (tmp_path / "run").rglob("server/**/log.txt")
    assert "absent: client 1 (site-2)" in log.read_text(encoding="utf-8")
