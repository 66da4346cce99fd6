# SPDX-License-Identifier: Apache-2.0
"""Where a run computes: on the CPU, or on a GPU with all clients of a round at once.

What is drawn at random is drawn on the CPU, from the same streams on any device: data, partition,
dropout, initial weights and the order of the batches. The one exception are the masks of dropout
layers, which come from the device's own generator, with a seed of their own in every round.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from fastagg import ops
from fastagg_sim.batched_clients import GPU_CLIENTS_AT_ONCE
from fastagg_sim.config import Config, ConfigError, LocalTraining


def require_device(device: str) -> None:
    """ConfigError, with the reason, if a job's `device` cannot be used here."""
    if device == "cpu":
        return
    if torch.version.cuda is None:
        reason = f"this PyTorch, {torch.__version__}, is built without CUDA"
    elif not torch.cuda.is_available():
        reason = "PyTorch sees no GPU"
    elif "cuda" not in ops.devices():
        reason = "this fastagg is built without CUDA kernels (docs/cuda.md)"
    else:
        return
    raise ConfigError(f"device: expected 'cpu' on this machine, got {device!r}: {reason}")


def find_device(device: str) -> torch.device:
    """The device that `device` means in this process. ConfigError if there is none."""
    require_device(device)
    if device == "cpu":
        return torch.device("cpu")
    # Without it cuBLAS may split sums as it likes, and PyTorch refuses to call it. Read at its
    # first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device("cuda", torch.cuda.current_device())


def on_device(config: Config, device: str) -> Config:
    """`config` on `device`. A GPU trains clients at once whatever `config` says; on a CPU nothing
    changes."""
    if device == "cpu":
        return config

    def batched(training: LocalTraining) -> LocalTraining:
        return dataclasses.replace(training, clients_at_once=GPU_CLIENTS_AT_ONCE)

    task = dataclasses.replace(config.task, device=device, training=batched(config.task.training))
    methods = tuple(
        method
        if method.training is None
        else dataclasses.replace(method, training=batched(method.training))
        for method in config.methods
    )
    return dataclasses.replace(config, task=task, methods=methods)


def now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Inside, a GPU computes in float32, as a CPU does, and gives the same bits again; an operation
    that cannot raises RuntimeError. The state of the global random generators is put back."""
    if device.type != "cuda":
        with torch.random.fork_rng(devices=[]):
            yield
        return
    cudnn, memory = torch.backends.cudnn, cast("Any", torch.utils.deterministic)
    strict, fill = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    with (
        torch.random.fork_rng(devices=[device]),
        cudnn.flags(
            enabled=bool(cudnn.enabled), benchmark=False, deterministic=True, allow_tf32=False
        ),
    ):
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False  # nothing reads such memory
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(strict)
            memory.fill_uninitialized_memory = fill


def seed_layers(device: torch.device, seed: int) -> None:
    """Seed the global generator from which layers like `nn.Dropout` draw on `device`."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
