# SPDX-License-Identifier: Apache-2.0
"""The clients of simulate.py, half of which are absent. Flower's workers import this module."""

from __future__ import annotations

from functools import cache

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fastagg_flower import task
from fastagg_sim.dropout import DropoutProcess, make_dropout
from fastagg_sim.simulation import split_clients

CLIENTS = 20
GROUPS = 5


@cache
def dropout(process: str, alpha: float) -> DropoutProcess:
    split = split_clients(task.job("fedavg", CLIENTS, 1, groups=GROUPS).task, task.dataset(), 0)
    return make_dropout(
        process, num_clients=CLIENTS, seed=task.SEED, groups=split.groups, alpha=alpha
    )


def client_app(process: str, alpha: float) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        server_round = int(message.content["config"]["server-round"])
        if partition not in dropout(process, alpha).active(server_round - 1).tolist():
            raise RuntimeError("absent in this round")
        net = task.model()
        task.set_weights(net, message.content["arrays"].to_numpy_ndarrays())
        samples = task.train(net, partition, CLIENTS, server_round, groups=GROUPS)
        names = message.content["arrays"].keys()
        arrays = zip(names, task.weights(net), strict=True)
        record = ArrayRecord({name: Array(value) for name, value in arrays})
        metrics = MetricRecord({"num-examples": samples, "partition-id": partition})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    return app
