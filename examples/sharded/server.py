# SPDX-License-Identifier: Apache-2.0
"""A server on several processes or machines, each of which stores some of the columns.

    torchrun --nproc-per-node 2 examples/sharded/server.py FOLDER --rounds 6

On several machines: ``torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint
HOST:29400 ...``, with FOLDER on a shared file system. An interrupted run resumes from its last
checkpoint bit-identically, also with another number of processes.

The clients are simulated: in every round, half of them write an update to a safetensors file.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from fastagg import ClientFiles, FlatLayout
from fastagg.distributed import ShardedAggregator

NUM_CLIENTS = 8
MODEL = {"weight": torch.zeros(300, 200), "bias": torch.zeros(300)}


def active_clients(t: int) -> list[int]:
    generator = torch.Generator().manual_seed(t)
    return torch.randperm(NUM_CLIENTS, generator=generator)[: NUM_CLIENTS // 2].tolist()


def clients_upload(folder: Path, t: int) -> None:
    """Write one file per active client, as if received over the network."""
    for client in active_clients(t):
        generator = torch.Generator().manual_seed(1000 * t + client)
        update = {name: torch.randn(x.shape, generator=generator) for name, x in MODEL.items()}
        save_file(update, folder / f"update-{client}.safetensors")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--rounds", type=int, default=6)
    arguments.add_argument("--rule", default="fdms")
    options = arguments.parse_args()
    if "RANK" not in os.environ:
        arguments.error("launch it with torchrun: torchrun --nproc-per-node 2 server.py FOLDER")
    options.folder.mkdir(parents=True, exist_ok=True)

    # If a rank dies, the others raise an error after at most this time.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    layout = FlatLayout.from_state_dict(MODEL)
    checkpoint = options.folder / "checkpoint"
    if checkpoint.exists():
        agg, columns, notes = ShardedAggregator.load(checkpoint)
        params, done = columns["params"], notes["rounds"]
    else:
        agg = ShardedAggregator(
            options.rule, num_clients=NUM_CLIENTS, num_params=layout.num_params, nonfinite="drop"
        )
        params, done = agg.own(layout.flatten(MODEL)), 0

    for t in range(done, options.rounds):
        if dist.get_rank() == 0:
            clients_upload(options.folder, t)
        dist.barrier()
        clients = active_clients(t)
        updates = ClientFiles(
            [options.folder / f"update-{client}.safetensors" for client in clients],
            layout,
            columns=(agg.begin, agg.end),
        )
        report = agg.step(params, updates, clients)
        agg.save(checkpoint, columns={"params": params}, notes={"rounds": t + 1})
        if dist.get_rank() == 0:
            print(f"round {t + 1}: active {report.active.tolist()}", flush=True)

    model = agg.gather(params)
    if dist.get_rank() == 0:
        save_file(layout.unflatten(model), options.folder / "model.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
