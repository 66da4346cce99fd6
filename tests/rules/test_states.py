# SPDX-License-Identifier: Apache-2.0
"""States to which no steps lead are refused, from a state dict and from a file; others load."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator, CheckpointError, checkpoint

K, D = 9, 7  # nine clients: a row of candidates is two bytes, of which seven bits are beyond K


def made(name: str, **options: Any) -> Aggregator:
    """Return an aggregator after rounds with the clients 0 to 4; 5 to 8 were never active."""
    agg = fastagg.make(name, num_clients=K, num_params=D, **options)
    generator, params = torch.Generator().manual_seed(3), torch.zeros(D)
    for clients in ([0, 1, 2], [1, 2, 3, 4], [0, 4]):
        agg.step(params, torch.randn(len(clients), D, generator=generator), clients)
    return agg


def put(name: str, value: float, *place: int) -> Callable[[dict[str, Tensor]], None]:
    def change(state: dict[str, Tensor]) -> None:
        state[name][place] = value

    return change


def both(name: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(state: dict[str, Tensor]) -> None:
        state[name][0, 1] = state[name][1, 0] = value

    return change


ELIMINATING = {"elimination": "released_case1"}
IMPOSSIBLE: list[tuple[str, dict[str, Any], Callable[[dict[str, Tensor]], None], str]] = [
    ("fdms", {}, both("counts", -1), r"counts.*: expected numbers in \[0, 3\], got -1 to 2"),
    ("fdms-soft", {}, both("counts", -1), r"counts.*: expected numbers in \[0, 3\]"),
    ("fdms", {}, both("counts", 4), r"counts.*: expected numbers in \[0, 3\], got 0 to 4"),
    ("fdms", {}, put("counts", 3, 0, 1), "counts.*: expected a symmetric matrix"),
    ("fdms", {}, put("scores", 0.5, 0, 1), "scores.*: expected a symmetric matrix"),
    ("fdms", {}, put("counts", 1, 2, 2), "counts.*: expected zeros where k = i"),
    ("fdms", {}, both("scores", 1.5), r"scores.*: expected numbers in .*to 1\.5"),
    ("fdms", {"similarity": "distance"}, both("scores", 0.1), "scores.*: expected numbers in"),
    ("fdms", {}, both("counts", 0), "scores.*: expected zeros where counts are 0"),
    ("fdms", {}, put("rounds", -1), "rounds.*: expected numbers in"),
    ("fdms", {}, put("rounds", 2**63 - 1), "rounds.*: expected numbers in"),
    ("fdms", ELIMINATING, put("candidates", 255, 3, 1), "candidates.*: expected no bits beyond 9"),
    ("fdms", ELIMINATING, put("candidates", 0, 3, 1), "candidates.*: expected every client itself"),
    ("fdms-means", {}, put("counts", -1, 2), r"counts.*: expected numbers in \[0, 2\.1"),
    ("fdms-means", {}, put("scales", 0.1, 2), r"scales.*: expected numbers in"),
    ("fdms-means", {}, put("scales", -0.001, 2), r"scales.*: expected numbers in"),
    ("fdms-means", {}, put("scales", 0.001, 7), r"scales.*: expected zeros where counts are 0"),
    ("fdms-means", {}, put("means", 1, 7, 0), r"means.*: expected a largest magnitude of 127"),
    ("fdms-means", {}, put("means", -128, 2, 0), r"means.*: expected a largest magnitude of 127"),
    ("fdms-means", {}, put("means", 0, 2), r"means.*: expected a largest magnitude of 127"),
    ("mifa", {}, put("total", 1e300, 2), "total.*: expected numbers in"),
    ("mifa", {}, put("total", 3e38, 2), "total.*: expected the weighted sum of the memory rows"),
    ("fedvarp", {}, put("total", -1e300, 2), "total.*: expected numbers in"),
    ("stale-models", {}, put("total", -3e38, 2), "total.*: expected the weighted sum"),
    ("stale", {}, put("memory", 3e38, 1, 2), "total.*: expected the weighted sum"),
    ("stale", {}, put("seen", 0, 1), "memory.*: expected zeros for client 1"),
    ("fedau", {}, put("factors", -1.0, 0), "factors.*: expected numbers in"),
    ("fedau", {"cutoff": 3}, put("factors", 3.1, 0), "factors.*: expected numbers in"),
    ("fedau", {}, put("factors", 2.0, 8), "factors.*: expected 1 before the first interval"),
    ("fedau", {}, put("intervals", -1, 0), "intervals.*: expected numbers in"),
    ("fedau", {}, put("waiting", 2**63 - 1, 0), "waiting.*: expected numbers in"),
    ("fedau", {}, put("factors", 1.3, 0), "factors.*: expected intervals of whole rounds"),
    ("fedstale", {}, put("factors", 0.5, 0), "factors.*: expected numbers in"),
    ("fedstale", {"cutoff": 3}, put("waiting", 3, 0), "waiting.*: expected numbers in"),
    (
        "fedstale",
        {},
        put("total", 3e38, 2),
        "total.*: expected the weighted sum of the memory rows",
    ),
    ("mifa-client", {}, put("answers", -1, 0), "answers.*: expected numbers in"),
    ("mifa-client", {}, put("total", 1e300, 2), "total.*: expected numbers in"),
    ("mifa-client", {}, put("answers", 0), "total.*: expected zeros before the first answer"),
    ("mimic-aged", {}, put("last", 3, 0), r"last.*: expected numbers in \[-1, 2\], got -1 to 3"),
    ("mimic-aged", {}, put("last", -2, 0), "last.*: expected numbers in"),
    ("mimic-aged", {}, put("last", -1, 0), "corrections.*: expected zeros for client 0"),
    ("bucketing", {}, put("rounds", -1), "rounds.*: expected numbers in"),
    ("mimic", {}, put("corrections", math.inf, 0, 0), "corrections.*: expected finite values"),
    ("scaffold", {"local_work": 1.0}, put("mean_control", math.nan, 0), "mean_control.*finite"),
    ("centered-clip", {}, put("previous", math.inf, 0), "previous.*: expected finite values"),
]


@pytest.mark.parametrize(("name", "options", "change", "match"), IMPOSSIBLE)
def test_an_impossible_state_is_refused(
    name: str,
    options: dict[str, Any],
    change: Callable[[dict[str, Tensor]], None],
    match: str,
    tmp_path: Path,
) -> None:
    agg = made(name, **options)
    before, bad = agg.state_dict(), agg.state_dict()
    change(bad)
    with pytest.raises(ValueError, match=match):
        agg.load_state_dict(bad)
    assert all(torch.equal(value, before[key]) for key, value in agg.state_dict().items())
    checkpoint.write(tmp_path / "a", name, agg.options(), bad)
    with pytest.raises(CheckpointError, match=match):
        fastagg.load(tmp_path / "a")
    agg.load_state_dict(before)
    agg.step(torch.zeros(D), torch.randn(3, D), [2, 5, 7])


OPTIONS = [
    ("scaffold", "local_work", 1e-40),
    ("centered-clip", "iterations", 2**62),
    ("geometric-median", "iterations", 2**62),
    ("fedau", "cutoff", 10**30),
    ("fedavg", "num_params", 10**30),
    ("fedavg", "server_lr", 10**400),
    ("fedavg", "max_norm", -(10**400)),
    ("fdms", "elimination", {"kind": "ReleasedThreshold", "factor": math.inf}),
    ("fdms", "elimination", {"kind": ["ReleasedThreshold"], "factor": 1.0}),
    ("fdms", "elimination", {"kind": "Theorem2Threshold", "beta": 1e-320, "num_clients": 9,
                             "rounds": 5, "p": 0.1, "b_max": 3, "delta_f": 0.0}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "option", "value"), OPTIONS)
def test_an_option_without_bounds_is_refused(name: str, option: str, value: Any) -> None:
    sizes: dict[str, Any] = {"num_clients": K, "num_params": D}
    with pytest.raises(ValueError):
        fastagg.make(name, **(sizes | {option: value}))


def test_a_bucket_of_any_size_holds_all_rows() -> None:
    params, twin = torch.zeros(D), torch.zeros(D)
    updates = torch.randn(4, D)
    for bucket_size, vector in ((4, params), (2**62 - 1, twin)):
        agg = fastagg.make("bucketing", num_clients=K, num_params=D, bucket_size=bucket_size)
        agg.step(vector, updates, range(4))
    assert torch.equal(params, twin)
    gram, weights = updates.double() @ updates.double().T, torch.ones(4, dtype=torch.float64)
    found = fastagg.ops.bucketed_gram(gram, torch.arange(4), weights, 2**63 - 1)
    assert found[0].shape == (1, 1)


def test_a_state_with_graphs_leaves_no_graph() -> None:
    for name in ("mifa", "mimic", "fdms"):
        agg = made(name)
        state: dict[str, Tensor] = {
            key: torch.nn.Parameter(value) if value.is_floating_point() else value
            for key, value in agg.state_dict().items()
        }
        agg.load_state_dict(state)
        assert not any(value.requires_grad for value in agg.state_dict().values())
        params = torch.zeros(D)
        agg.step(params, torch.randn(3, D), [2, 5, 7])
        assert not params.requires_grad


def test_only_dense_tensors_are_taken() -> None:
    agg = made("mifa")
    state = agg.state_dict()
    state["memory"] = state["memory"].to_sparse()
    with pytest.raises(TypeError, match=r"state\['memory'\]: expected a dense tensor"):
        agg.load_state_dict(state)


@pytest.mark.parametrize("name", ["mifa", "stale", "mimic", "scaffold", "fdms", "geometric-median"])
def test_a_failure_after_the_exchange_takes_everything_back(
    name: str, monkeypatch: pytest.MonkeyPatch, same_bits: Callable[..., None]
) -> None:
    options: dict[str, Any] = {"scaffold": {"local_work": 1.0}, "geometric-median": {"reuse": True}}
    agg, twin = (made(name, **options.get(name, {})) for _ in range(2))
    fresh = fastagg.make(name, num_clients=K, num_params=D, **options.get(name, {})).state_dict()

    def full() -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(agg, "_state_loaded", full)
        with pytest.raises(MemoryError):
            agg.load_state_dict(fresh)
    params, other = torch.zeros(D), torch.zeros(D)
    updates = torch.randn(4, D)
    agg.step(params, updates, [0, 3, 6, 8])
    twin.step(other, updates, [0, 3, 6, 8])
    same_bits(params, other)
    for key, value in agg.state_dict().items():
        same_bits(value, twin.state_dict()[key], key)


def test_huge_and_old_rows_are_no_reason_to_refuse() -> None:
    """Rounding errors of earlier, larger rows stay in the total."""
    agg = fastagg.make("mifa", num_clients=3, num_params=D)
    params = torch.zeros(D)
    agg.step(params, torch.full((3, D), 1e37), range(3))
    agg.step(params, torch.randn(3, D), range(3))
    off = (agg.state_dict()["total"] - agg.state_dict()["memory"].double().mean(0)).abs().max()
    assert off > 1e15  # 1e37 * 2^-53 is 1e21
    agg.load_state_dict(agg.state_dict())
