# SPDX-License-Identifier: Apache-2.0
"""The device of a run: the CPU, or a GPU that trains many clients at once.

Random numbers are drawn on the CPU, from the same streams for every device: data, partition,
dropout, initial weights and the order of the batches. The only exception are the masks of dropout
layers, which come from the generator of the device, seeded anew in every round.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from fastagg import ops
from fastagg_sim.batched_clients import GPU_CLIENTS_AT_ONCE
from fastagg_sim.config import Config, ConfigError, LocalTraining


def require_device(device: str) -> None:
    """Raise ConfigError, with the reason, if `device` ("cpu" or "cuda") is not available."""
    if device == "cpu":
        return
    if torch.version.cuda is None:
        reason = f"this PyTorch, {torch.__version__}, is built without CUDA"
    elif not torch.cuda.is_available():
        reason = "PyTorch sees no GPU"
    elif "cuda" not in ops.devices():
        reason = "this fastagg is built without CUDA kernels (see docs/cuda.md)"
    else:
        return
    raise ConfigError(f"device: expected 'cpu' on this machine, got {device!r}: {reason}")


def find_device(device: str) -> torch.device:
    """Return the torch device for `device` ("cpu" or "cuda") in this process.

    Raises ConfigError if the device is not available.
    """
    require_device(device)
    if device == "cpu":
        return torch.device("cpu")
    # Without this variable the sums of cuBLAS are not deterministic, and PyTorch refuses to call it
    # in deterministic mode. cuBLAS reads the variable when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device("cuda", torch.cuda.current_device())


def on_device(config: Config, device: str) -> Config:
    """Return `config` with all jobs on `device`.

    On a GPU, `clients_at_once` is always `GPU_CLIENTS_AT_ONCE`. On a CPU `config` is returned
    unchanged.
    """
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
    """Wait until the device has finished all its work, then return the time of a clock in
    seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux, getrusage counts what the process was before it called exec, too.
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return 1024 * int(peak)


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Within this context, a GPU computes deterministically and in full float32 precision.

    An operation that has no deterministic implementation raises RuntimeError. The state of the
    global random generators is restored at the end, on a CPU too.
    """
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
        memory.fill_uninitialized_memory = False  # not needed: uninitialised memory is never read
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(strict)
            memory.fill_uninitialized_memory = fill


def seed_layers(device: torch.device, seed: int) -> None:
    """Seed the global generator of `device`, which layers such as `nn.Dropout` use."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
