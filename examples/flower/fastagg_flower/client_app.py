# SPDX-License-Identifier: Apache-2.0
"""The client, for Flower's message API."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fastagg_flower import faults, task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    partition = int(context.node_config["partition-id"])
    config = context.run_config
    server_round = int(message.content["config"]["server-round"])
    net = task.model()
    task.set_weights(net, message.content["arrays"].to_numpy_ndarrays())
    samples = task.train(net, partition, int(config["clients"]), server_round)
    arrays = faults.inject(
        str(config["faults"]),
        server_round,
        partition,
        float(config["timeout"]),
        task.weights(net),
    )
    names = message.content["arrays"].keys()
    record = ArrayRecord({n: Array(a) for n, a in zip(names, arrays, strict=True)})
    # The server identifies this client by its partition, in this run and after a restart.
    reported = faults.claimed(str(config["faults"]), server_round, partition)
    metrics = MetricRecord({"num-examples": samples, "partition-id": reported})
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)
