# SPDX-License-Identifier: Apache-2.0
"""Steps do not depend on torch's modes, and calls of one aggregator exclude each other."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator, ColumnBlocks, FedAWEClient, MIFAClient, MimiCClient, robust
from fastagg.modes import plain_modes
from fastagg.ops import selfcheck

K, D = 6, 23
every_rule = pytest.mark.every_rule


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "default dtype": default_dtype,
    "default device": default_device,
    "device block": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "flush denormals": flushing,
}


def rounds(tiny: bool = False) -> list[tuple[Tensor, list[int]]]:
    generator = torch.Generator().manual_seed(5)
    scale = 1e-40 if tiny else 1.0  # denormals, if tiny
    sizes = ([0, 3, 4], [1, 2, 3, 5], [], [0, 4, 5])
    return [(scale * torch.randn(len(ids), D, generator=generator), ids) for ids in sizes]


def run(
    name: str, options: dict[str, Any], first: Any, second: Any, tmp_path: Path, tiny: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Make and use an aggregator in one mode, load its state and go on in another."""
    given = rounds(tiny)
    params = torch.zeros(D)
    with first():
        agg = fastagg.make(name, num_clients=K, num_params=D, **options)
        for updates, ids in given[:2]:
            agg.step(params, updates, ids)
        agg.save(tmp_path / "a")
        again = fastagg.load(tmp_path / "a")
        again.load_state_dict(agg.state_dict())
    with second():
        for updates, ids in given[2:]:
            again.step(params, updates, ids)
        state = again.state_dict()
    return params, state


@pytest.mark.slow
@every_rule
def test_no_mode_changes_a_bit(
    same_bits: Callable[..., None], name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    for mode, context in MODES.items():
        tiny = mode == "flush denormals"
        expected, state = run(name, options, nullcontext, nullcontext, tmp_path, tiny)
        for first, second in ((context, nullcontext), (nullcontext, context), (context, context)):
            params, found = run(name, options, first, second, tmp_path, tiny)
            same_bits(params, expected, mode)
            for key in state:
                same_bits(found[key], state[key], f"{mode} {key}")


@every_rule
def test_parameters_made_in_inference_mode_are_changed(
    same_bits: Callable[..., None], name: str, options: dict[str, Any]
) -> None:
    updates, ids = rounds()[0]
    expected = torch.zeros(D)
    fastagg.make(name, num_clients=K, num_params=D, **options).step(expected, updates, ids)
    agg = fastagg.make(name, num_clients=K, num_params=D, **options)
    with torch.inference_mode():
        params, rows = torch.zeros(D), updates + 0.0
        assert params.is_inference() and rows.is_inference()
    agg.step(params, rows, ids)
    same_bits(torch.from_numpy(params.numpy()), expected)


def test_plain_modes_leave_every_device_of_the_caller() -> None:
    def place() -> str:
        return torch.zeros(()).device.type

    with torch.device("meta"), torch.device("meta"):
        with plain_modes():
            assert place() == "cpu"
            with torch.device("meta"), plain_modes():
                assert place() == "cpu"
            assert place() == "cpu"
        assert place() == "meta"
        with ThreadPoolExecutor(1) as pool:  # a block belongs to its thread
            assert pool.submit(place).result() == "cpu"
    with default_device():
        with torch.device("cpu"), plain_modes():
            assert place() == "cpu"
        with plain_modes():
            assert place() == "cpu"
        assert place() == "meta"
    assert place() == "cpu"


def of_aggregators(mode: Callable[[], AbstractContextManager[object]]) -> list[Tensor]:
    """Use what an aggregator has besides its steps, in a mode; return results and states."""
    rows, found = torch.randn(3, D, generator=torch.Generator().manual_seed(2)), []
    for name, options in (
        ("median", {}),  # multiplies its aggregate by `_rate`
        ("mimic", {}),  # has references
        ("mifa", {"memory_dtype": "int8"}),
        ("scaffold", {"local_work": 0.5}),
    ):
        agg = fastagg.make(name, num_clients=K, num_params=D, **options)
        buffer, params = fastagg.UpdateBuffer(K, D), torch.ones(D)
        for client, row in enumerate(rows):
            buffer.row(client).copy_(row)
        with mode():
            buffer.subtract_(params, [0, 2])
            agg.server_lr = 0.3
            agg.max_norm, agg.clip_norm = 1e3, "adaptive"
            if name == "scaffold":
                agg.local_work = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
        agg.step(params, buffer, [0, 1, 2])
        with mode():
            if name == "scaffold":
                found += [agg.control(0), agg.local_work]
            elif name != "median":
                memory = agg.corrections if name == "mimic" else agg.memory
                found += [memory[0], memory.clone()]
            agg.forget([1])
            agg.grow(K + 1, **({"local_work": 0.5} if name == "scaffold" else {}))
            found += list(agg.state_dict().values())
        agg.step(params, rows, [0, 1, K])
        found += [params, *agg.state_dict().values()]
    return found


def of_clients(mode: Callable[[], AbstractContextManager[object]]) -> list[Tensor]:
    """Use the client's parts of rules in a mode; return their state and answers."""
    first, second = torch.randn(2, D, generator=torch.Generator().manual_seed(3))
    with mode():
        mimic, mifa, awe = MimiCClient(D), MIFAClient(D), FedAWEClient(first)
        sent = mimic.correct_(second.clone())
        mimic.learn(sent, first)
        mifa.learn(0)
        difference = mifa.difference_(second.clone())
        mifa.learn(1)
        answer = awe.answer_(second.clone(), 3)
    return [sent, mimic.correct_(second.clone()), difference, mifa.row, answer]


def of_callables(mode: Callable[[], AbstractContextManager[object]]) -> list[Tensor]:
    """Call everything of ``fastagg.robust`` in a mode."""
    vectors = torch.randn(7, D, generator=torch.Generator().manual_seed(4))
    made = [getattr(robust, name) for name in robust.__all__]
    found = []
    for cls in made:
        options = {"f": 2} if "f" in signature(cls).parameters else {}
        if cls is robust.Bucketing:
            options = {"s": 1}  # without random pairs
        with mode():
            found.append(torch.as_tensor(cls(**options)(vectors), device="cpu"))
    return found


def of_tools(mode: Callable[[], AbstractContextManager[object]]) -> list[Tensor]:
    """Call functions of the library that make tensors of their own."""
    state = {"weight": torch.ones(2, 3), "bias": torch.full((2,), 0.5)}
    with mode():
        assert all(check.passed for check in selfcheck.run(K=7, S=4, d=300))
        flat = fastagg.FlatLayout.from_state_dict(state).flatten(state)
        return [flat, fastagg.ops.abs_max([]), fastagg.ops.gram([])]


@pytest.mark.parametrize("use", [of_aggregators, of_clients, of_callables, of_tools])
@pytest.mark.parametrize("mode", ["default device", "device block"])
def test_other_functions_do_not_depend_on_the_default_device(
    same_bits: Callable[..., None], use: Callable[..., list[Tensor]], mode: str
) -> None:
    for found, expected in zip(use(MODES[mode]), use(nullcontext), strict=True):
        same_bits(found, expected)


# --- threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "mifa", "fdms", "mimic", "centered-clip"])
def test_threads_take_turns(name: str, tmp_path: Path) -> None:
    width, agg = 3000, fastagg.make(name, num_clients=K, num_params=3000)
    stop = threading.Event()

    def train(seed: int) -> Tensor:
        generator, params = torch.Generator().manual_seed(seed), torch.zeros(width)
        for _ in range(60):
            ids = torch.randperm(K, generator=generator)[:4]
            agg.step(params, torch.randn(4, width, generator=generator), ids)
        return params

    def keep_saving() -> int:
        saves = 0
        while not stop.is_set():
            agg.save(tmp_path / "a")
            fastagg.load(tmp_path / "a")  # a state that is half of two steps is refused
            agg.load_state_dict(agg.state_dict())
            saves += 1
        return saves

    with ThreadPoolExecutor(5) as pool:
        saving = pool.submit(keep_saving)
        trained = list(pool.map(train, range(4)))
        stop.set()
        assert saving.result() > 0
    assert all(bool(torch.isfinite(params).all()) for params in trained)
    if name == "fedavg":  # without state: as if each thread had an aggregator of its own
        for seed, params in enumerate(trained):
            assert torch.equal(params, train(seed))


def test_a_call_within_a_step_is_an_error(tmp_path: Path) -> None:
    agg: Aggregator = fastagg.make("fedavg", num_clients=K, num_params=D)
    params = torch.zeros(D)

    def blocks() -> Iterator[Tensor]:
        agg.save(tmp_path / "a")  # reads only: allowed, for handlers of signals
        agg.step(params, torch.ones(1, D), [0])
        yield torch.ones(1, D)

    with pytest.raises(RuntimeError, match="step: expected no other call of this aggregator"):
        agg.step(params, ColumnBlocks(blocks, num_rows=1, num_params=D), [1])
    assert not params.any()
    agg.step(params, torch.ones(1, D), [1])
    assert params.all()


def test_a_copy_has_a_lock_of_its_own() -> None:
    agg = fastagg.make("mimic", num_clients=K, num_params=D)
    other, params = copy.deepcopy(agg), torch.zeros(D)
    other.step(params, torch.ones(1, D), [0])
    assert not agg.state_dict()["corrections"].any()


# --- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "vector"), [("scaffold", "mean_control"), ("centered-clip", "previous"), ("mimic", "")]
)
def test_params_may_not_be_a_vector_of_the_state(name: str, vector: str) -> None:
    options: dict[str, Any] = {"scaffold": {"local_work": 1.0}, "mimic": {"mode": "client"}}
    agg = fastagg.make(name, num_clients=K, num_params=D, **options.get(name, {}))
    agg.step(torch.zeros(D), torch.randn(2, D), [0, 1])
    state = getattr(agg, vector or "aggregate")
    before = state.clone()
    with pytest.raises(ValueError, match="params: must not share memory with the state"):
        agg.step(state, torch.randn(2, D), [0, 1])
    assert torch.equal(state, before)


def test_a_duplicate_among_many_ids_is_found_at_once() -> None:
    agg = fastagg.make("fedavg", num_clients=60_000, num_params=1)
    begin = time.perf_counter()
    with pytest.raises(ValueError, match=r"distinct ids, got \[7\] more than once"):
        agg.step(torch.zeros(1), torch.zeros(30_001, 1), [*range(30_000), 7])
    assert time.perf_counter() - begin < 5.0  # counting each id took 24 s
