# SPDX-License-Identifier: Apache-2.0
"""Compare FDMS with FedAvg in Flower's simulation engine, with half of the clients absent.

    python simulate.py --rounds 60 --out results

There are 20 clients in 5 groups; each group has two of the ten digits. In every round 10 clients
answer with an error, but never a whole group, as FL-FDMS assumes. ``--process exact`` draws them
uniformly.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import logging
import os
from pathlib import Path
from statistics import fmean

from fastagg_flower import task
from fastagg_flower.rounds import RoundLog, digest
from fastagg_flower.simulated import CLIENTS, GROUPS, client_app
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fastagg.integrations.flower import FastAggStrategy
from fastagg_sim.config import Dropout
from fastagg_sim.plots import accuracy_figure
from fastagg_sim.records import Curve
from fastagg_sim.simulation import Simulation


def accuracies(rule: str, rounds: int, process: str, alpha: float) -> tuple[list[float], str]:
    """Return the accuracy after every round, and the hash of the last model."""
    curve: list[float] = []
    last = ""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FastAggStrategy(
            rule, num_clients=CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS
        )

        def evaluate(server_round: int, _: ArrayRecord) -> None:
            nonlocal last
            if server_round:
                curve.append(RoundLog.accuracy(strategy.server.params))
                last = digest(strategy.server.params)

        strategy.start(
            grid,
            ArrayRecord(task.model().state_dict()),
            num_rounds=rounds,
            evaluate_fn=evaluate,
        )

    run_simulation(
        server_app=app,
        client_app=client_app(process, alpha),
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    return curve, last


def of_our_simulation(rule: str, rounds: int, process: str, alpha: float) -> str:
    """Return the hash of the last model of the same run in fastagg's own simulation."""
    away = Dropout(process, {"alpha": alpha})
    simulation = Simulation(task.job(rule, CLIENTS, rounds, away, groups=GROUPS))
    while not simulation.done:
        simulation.run_round()
    return digest(simulation.params)


def write(folder: Path, curves: list[Curve]) -> None:
    """Write accuracy.csv, with a row for each rule and round, and accuracy.png."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "accuracy.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["rule", "dropout", "round", "accuracy"])
        for curve in curves:
            for number, accuracy in zip(curve.rounds, curve.accuracy, strict=True):
                table.writerow([curve.method, curve.dropout, number + 1, f"{accuracy:.6f}"])
    accuracy_figure(curves, folder / "accuracy.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--rules", nargs="+", default=["fedavg", "fdms"])
    parser.add_argument("--process", default="cluster-floor", choices=("cluster-floor", "exact"))
    parser.add_argument(
        "--alpha", type=float, default=0.5, help="dropout ratio: the fraction of absent clients"
    )
    parser.add_argument("--out", type=Path, help="folder for accuracy.csv and accuracy.png")
    options = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        parser.error("Flower's simulation engine is not installed: pip install 'flwr[simulation]'")
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # no tracebacks of absent clients
    last = min(10, options.rounds)
    curves = []
    for rule in options.rules:
        setting = (rule, options.rounds, options.process, options.alpha)
        curve, bits = accuracies(*setting)
        away = f"{options.process}-{options.alpha:g}"
        rounds = list(range(len(curve)))
        curves.append(Curve(rule, rule, away, task.SEED, rounds, accuracy=curve))
        same = "the bits" if bits == of_our_simulation(*setting) else "NOT the bits"
        print(
            f"{rule}: accuracy {fmean(curve[-last:]):.3f} (mean of the last {last} rounds), "
            f"{same} of fastagg's own simulation",
            flush=True,
        )
    if options.out is not None:
        write(options.out, curves)


if __name__ == "__main__":
    main()
