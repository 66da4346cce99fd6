# SPDX-License-Identifier: Apache-2.0
"""The server, for Flower's message API."""

from __future__ import annotations

from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fastagg.integrations.flower import FastAggStrategy
from fastagg_flower import task
from fastagg_flower.rounds import RoundLog

app = ServerApp()


class Logged(FastAggStrategy):
    """Also writes the clients of every round to a file, from which run.py repeats the run."""

    log: RoundLog

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        with self.server.held():  # no signal arrives between a round and its line in the file
            result = super().aggregate_train(server_round, replies)
            self.log.append(self.last_report, self.server.params)
        return result


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    clients = int(config["clients"])
    checkpoint = str(config["checkpoint"]) or None
    strategy = Logged(
        str(config["rule"]),
        num_clients=clients,
        fraction_evaluate=0.0,
        min_train_nodes=1,
        min_available_nodes=clients,
        checkpoint_path=checkpoint,
        checkpoint_every=int(config["checkpoint-every"]),
        # Without keys, a SuperNode that starts again is another node for Flower.
        release_after=None if config["authenticated"] else 0,
    )
    strategy.log = RoundLog(Path(str(config["out"]) or "rounds.jsonl"))
    net = task.model()
    strategy.start(
        grid,
        ArrayRecord(net.state_dict()),
        num_rounds=int(config["rounds"]),
        timeout=float(config["timeout"]),
        resume_from=checkpoint if config["resume"] else None,
    )
    print(f"accuracy {strategy.log.accuracy(strategy.server.params):.3f}")
