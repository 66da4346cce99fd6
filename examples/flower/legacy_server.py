# SPDX-License-Identifier: Apache-2.0
"""The server for Flower's legacy API, over gRPC. run.py starts it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fastagg_flower import task
from fastagg_flower.rounds import RoundLog
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig, start_server

from fastagg import checkpoint
from fastagg.integrations.flower import FastAggLegacyStrategy


class Logged(FastAggLegacyStrategy):
    """Also writes the clients of every round to a file, from which run.py repeats the run."""

    log: RoundLog

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        with self.server.held():  # no signal arrives between a round and its line in the file
            result = super().aggregate_fit(server_round, results, failures)
            self.log.append(self.last_report, self.server.params)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--rule", default="fdms")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the whole run")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="time limit of a round, in seconds"
    )
    parser.add_argument("--out", type=Path, default=Path("rounds.jsonl"), help="file of the rounds")
    parser.add_argument("--checkpoint", help="file for the state of the run")
    parser.add_argument(
        "--checkpoint-every", type=int, default=1, help="rounds between two checkpoints"
    )
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint")
    options = parser.parse_args()
    strategy = Logged(
        options.rule,
        num_clients=options.clients,
        fraction_evaluate=0.0,
        min_fit_clients=1,
        min_available_clients=options.clients,
        on_fit_config_fn=lambda _: {"round": strategy.server.rounds + 1},
        initial_parameters=ndarrays_to_parameters(task.weights(task.model())),
        checkpoint_path=options.checkpoint,
        checkpoint_every=options.checkpoint_every,
        resume_from=options.checkpoint if options.resume else None,
    )
    strategy.log = RoundLog(options.out)
    done = 0
    if options.resume:
        _, content, _ = checkpoint.read(options.checkpoint, limit=checkpoint.LISTS_LIMIT)
        done = content["rounds"]
    start_server(
        server_address=options.address,
        strategy=strategy,
        config=ServerConfig(
            num_rounds=options.rounds - done,  # Flower counts from 1 again
            round_timeout=options.timeout,
        ),
    )


if __name__ == "__main__":
    main()
