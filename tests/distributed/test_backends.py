# SPDX-License-Identifier: Apache-2.0
"""The choice of the backend for messages; these tests need neither ranks nor a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fastagg.distributed import ShardedAggregator
from fastagg.distributed.ranks import message_device


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    "backends", ["cpu:gloo", "cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"]
)
def test_gloo_is_preferred(backends: str, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert message_device(backends) == torch.device("cpu")


def test_nccl_without_gloo_uses_the_gpu_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert message_device("cuda:nccl") == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="PyTorch sees none here; use gloo"):
        message_device("cuda:nccl")


@pytest.mark.parametrize("backends", ["cpu:mpi,cuda:mpi", "cpu:mpi", "xpu:ccl"])
def test_other_backends_are_refused(backends: str) -> None:
    with pytest.raises(ValueError, match=f"group: expected gloo .* got {backends}"):
        message_device(backends)


@pytest.fixture(name="begin")
def _begin(tmp_path: Path) -> Iterator[object]:
    def begin(backend: str | None) -> None:
        dist.init_process_group(
            backend,
            init_method=f"file://{tmp_path}/store",
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=60),
        )

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo", None])
def test_the_backend_description_of_torch_is_parsed(begin: object, backend: str | None) -> None:
    begin(backend)  # type: ignore[operator]
    agg = ShardedAggregator("geometric-median", num_clients=2, num_params=5)
    params = torch.zeros(5)
    agg.step(params, torch.ones(2, 5), [0, 1])
    assert torch.equal(params, torch.ones(5))


def test_no_reference_to_the_default_group_is_kept(begin: object) -> None:
    """A group that outlives destroy_process_group sometimes aborts the process at exit."""
    begin("gloo")  # type: ignore[operator]
    agg = ShardedAggregator("fdms", num_clients=2, num_params=5)
    agg.step(torch.zeros(5), torch.ones(2, 5), [0, 1])
    assert dist.group.WORLD is not None
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert group() is None
    with pytest.raises(ValueError, match="process group has not been initialized"):
        agg.step(torch.zeros(5), torch.ones(2, 5), [0, 1])
