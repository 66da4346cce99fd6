# SPDX-License-Identifier: Apache-2.0
"""A client for Flower's legacy API, over gRPC. run.py starts one per partition."""

from __future__ import annotations

import argparse

import grpc
import numpy as np
from fastagg_flower import faults, task
from flwr.client import NumPyClient, start_client
from flwr.common import Scalar


class DigitsClient(NumPyClient):
    def __init__(self, partition: int, clients: int, timeout: float, trouble: str) -> None:
        self.partition = partition
        self.clients = clients
        self.timeout = timeout
        self.trouble = trouble
        self.net = task.model()

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Scalar]
    ) -> tuple[list[np.ndarray], int, dict[str, Scalar]]:
        server_round = int(config["round"])
        task.set_weights(self.net, parameters)
        samples = task.train(self.net, self.partition, self.clients, server_round)
        arrays = faults.inject(
            self.trouble, server_round, self.partition, self.timeout, task.weights(self.net)
        )
        # The server identifies this client by its partition, also after it has reconnected.
        return arrays, samples, {"partition-id": self.partition}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--partition", type=int, required=True)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--faults", default="", help=faults.__doc__)
    options = parser.parse_args()
    client = DigitsClient(options.partition, options.clients, options.timeout, options.faults)
    while True:
        try:
            start_client(server_address=options.address, client=client.to_client())
        except (RuntimeError, grpc.RpcError) as error:  # an injected error, or a timeout
            print(f"connecting again after {error!r}", flush=True)
        else:
            return  # the server has ended the run


if __name__ == "__main__":
    main()
