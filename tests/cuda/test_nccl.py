# SPDX-License-Identifier: Apache-2.0
"""A sharded aggregator of one rank over NCCL gives the same bits as one without ranks.

The same test runs with gloo, which needs no GPU, so that the test itself is checked without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fastagg
from fastagg import ops
from fastagg.distributed import ShardedAggregator
from fastagg.updates.columns import Columns

K, S, D, SEGMENT = 6, 4, 5_003, 1_024

WAYS = [pytest.param("gloo", "cpu", id="gloo-cpu")]
if "cuda" in ops.devices() and dist.is_nccl_available():
    WAYS += [
        pytest.param("nccl", "cpu", id="nccl-cpu"),
        pytest.param("nccl", "cuda", id="nccl-cuda"),
        pytest.param("cpu:gloo,cuda:nccl", "cuda", id="both-cuda"),
    ]


@pytest.fixture(name="one_rank")
def _one_rank(backend: str, tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        backend,
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("rule", ["fdms", "geometric-median", "mimic", "mifa"])
@pytest.mark.parametrize(("backend", "device"), WAYS)
def test_one_rank_gives_the_bits_of_an_unsharded_aggregator(
    one_rank: None, backend: str, device: str, rule: str, tmp_path: Path
) -> None:
    sharded = ShardedAggregator(
        rule, num_clients=K, num_params=D, segment=SEGMENT, device=device, max_norm=72.0
    )
    alone = fastagg.make(rule, num_clients=K, num_params=D, device=device, max_norm=72.0)
    alone.columns = Columns(SEGMENT)
    params, expected = torch.zeros(D, device=device), torch.zeros(D, device=device)
    for t in range(4):
        generator = torch.Generator().manual_seed(t)
        clients = torch.randperm(K, generator=generator)[:S].tolist()
        updates = torch.randn(S, D, generator=generator).to(device)
        report, wanted = (
            sharded.step(params, updates, clients),
            alone.step(expected, updates, clients),
        )
        assert torch.equal(report.active, wanted.active)
        assert torch.equal(report.weights, wanted.weights)
    assert params.abs().max() > 0.1
    assert torch.equal(params, expected)
    assert torch.equal(sharded.gather(params), expected)
    state = sharded.state_dict()
    for name, value in alone.state_dict().items():
        assert torch.equal(state[name], value), name
    sharded.save(tmp_path / "checkpoint", columns={"params": params})
    assert (tmp_path / "checkpoint" / "manifest.json").is_file()
