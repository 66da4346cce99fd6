# SPDX-License-Identifier: Apache-2.0
"""``max_norm="adaptive"``: a multiple of the running median of norms, for every rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import AdaptiveNorm, Aggregator, EnqueuedFDMS
from fastagg.updates.streams import ColumnBlocks

K, D = 6, 23
Check = Callable[..., None]
every_rule = pytest.mark.every_rule  # (name, options): see the conftest of this folder
exact_rule = pytest.mark.exact_rule


def make(name: str, options: dict[str, Any], **more: Any) -> Aggregator:
    return fastagg.make(name, num_clients=K, num_params=D, **options, **more)


def rows_of(*norms: float) -> Tensor:
    rows = torch.zeros(len(norms), D)
    rows[:, 4] = torch.tensor(norms)
    return rows


def rejected(agg: Aggregator, *norms: float) -> list[int]:
    report = agg.step(torch.zeros(D), rows_of(*norms), range(len(norms)))
    return report.rejected.tolist()


def test_worked_by_hand() -> None:
    agg = make("fedavg", {}, max_norm=AdaptiveNorm(multiple=4.0, window=5, warmup=4))
    assert rejected(agg, 1.0, 100.0) == []  # two norms are too few for a bound
    # with those of this round: the lower median of 1, 2, 9, 100 is 2; a zero row does not count
    assert rejected(agg, 2.0, 9.0, 0.0) == [1]
    assert agg.state_dict()["norms"].tolist() == [1.0, 100.0, 2.0, 8.0, 0.0]
    assert rejected(agg, 8.5) == [0]  # four are known, which is enough: 4 times 2
    assert rejected(agg, 32.0, 33.0) == [1]  # the median of 1, 100, 2, 8, 8 is 8


def test_norms_of_a_window_by_hand() -> None:
    agg = make("fedavg", {}, max_norm={"multiple": 4.0, "window": 3, "warmup": 0})
    state = agg.state_dict
    assert rejected(agg, 3.0, 1.0, 2.0) == []  # nothing is known before: no bound
    assert state()["norms"].tolist() == [3.0, 1.0, 2.0]
    assert rejected(agg, 8.0, 8.5) == [1]  # the bound is 4 * 2
    assert state()["norms"].tolist() == [8.0, 8.0, 2.0]  # 8.5 counts as 8; the oldest have left
    assert int(state()["norm_count"]) == 5
    assert rejected(agg, 0.0, 32.0) == []  # the bound is 4 * 8; a zero row does not count
    assert state()["norms"].tolist() == [8.0, 8.0, 32.0]


def oracle(history: list[float], norms: list[float], options: AdaptiveNorm) -> float:
    """Return the bound from all norms so far, from the text of the class."""
    known = history[-options.window :]
    if len(known) < options.warmup:
        known = known + [norm for norm in norms if norm > 0]
    if len(known) < 3:
        return math.inf
    return options.multiple * sorted(known)[(len(known) + 1) // 2 - 1]


@exact_rule
def test_follows_the_oracle_and_the_others_are_as_without_the_long_rows(
    same_bits: Check, name: str, options: dict[str, Any]
) -> None:
    adaptive = AdaptiveNorm(multiple=3.0, window=9, warmup=5)
    agg, twin_agg = make(name, options, max_norm=adaptive), make(name, options)
    params, twin = torch.zeros(D), torch.zeros(D)
    g = torch.Generator().manual_seed(3)
    history: list[float] = []
    found = 0
    for t in range(15):
        clients = sorted(torch.randperm(K, generator=g)[:4].tolist())
        updates = torch.randn(4, D, generator=g)
        updates[t % 4] *= 10.0 ** float(torch.randint(-1, 3, (), generator=g))
        norms = updates.double().norm(dim=1).tolist()
        bound = oracle(history, norms, adaptive)
        history += [min(norm, bound) for norm in norms]
        kept = [i for i, norm in enumerate(norms) if norm <= bound]
        rows: Any = updates
        if t % 3 == 1:
            rows = ColumnBlocks(lambda u=updates: u.split(7, dim=1), num_rows=4, num_params=D)
        report = agg.step(params, rows, clients)
        assert report.active.tolist() == [clients[i] for i in kept]
        for client, reason in report.reasons.items():
            assert f"but the adaptive max_norm is {bound:.6g}" in reason, client
        twin_agg.step(twin, updates[kept], report.active)
        same_bits(params, twin)
        found += len(report.rejected)
    torch.testing.assert_close(
        agg.state_dict()["norms"].sort().values, torch.tensor(sorted(history[-9:])).double()
    )
    assert found >= 4


@every_rule
def test_arrival_order_and_a_restart_change_no_bit(
    same_bits: Check, same_state: Check, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    adaptive = {"multiple": 1.5, "window": 7, "warmup": 3}
    first, second = make(name, options, max_norm=adaptive), make(name, options, max_norm=adaptive)
    params, twin = torch.zeros(D), torch.zeros(D)
    g = torch.Generator().manual_seed(5)
    found = 0
    for _ in range(8):
        clients = torch.randperm(K, generator=g)[:4]
        updates = (1 + 3 * torch.rand(4, 1, generator=g)) * torch.randn(4, D, generator=g)
        found += len(first.step(params, updates, clients).rejected)
        order = torch.tensor([3, 1, 0, 2])
        second.step(twin, updates[order], clients[order])
        same_bits(params, twin)
        same_state(first, second)
        second.save(tmp_path / "a")
        second = fastagg.load(tmp_path / "a")
        assert second.max_norm == AdaptiveNorm(1.5, 7, 3)
    assert found >= 2


def test_growing_norms_are_let_in_again() -> None:
    """Rows of ten times the norms are left out at first, and then move the median."""
    agg = make("fedavg", {}, max_norm=AdaptiveNorm(multiple=5.0, window=12, warmup=0))
    for _ in range(3):
        assert rejected(agg, 1.0, 1.0, 1.0, 1.0) == []
    refused = [len(rejected(agg, 10.0, 10.0, 10.0, 10.0)) for _ in range(4)]
    assert refused == [4, 4, 0, 0]


def test_a_minority_cannot_move_the_bound_beyond_a_multiple_of_the_honest_norms() -> None:
    agg = make("fedavg", {}, max_norm="adaptive")
    size = 1.0
    for _ in range(200):
        report = agg.step(torch.zeros(D), rows_of(1.0, 1.1, 0.9, 1.2, size, size), range(K))
        size = size * 1.05 if 4 in report.active else size
    assert size < 12.0 * 1.05


def test_drop_makes_it_the_default_and_none_takes_it_off() -> None:
    assert make("fedavg", {}).max_norm is None
    assert make("fedavg", {}, nonfinite="drop").max_norm == AdaptiveNorm()
    assert make("fedavg", {}, nonfinite="drop", max_norm=None).max_norm is None
    agg = make("fedavg", {}, nonfinite="drop")
    assert set(agg.state_dict()) == {"norms", "norm_count"}
    agg.max_norm = 3.0
    assert not agg.state_dict()
    agg.max_norm = "adaptive"
    assert int(agg.state_dict()["norm_count"]) == 0
    rejected(agg, 1.0, 2.0)
    agg.max_norm = AdaptiveNorm()  # equal: nothing is forgotten
    assert int(agg.state_dict()["norm_count"]) == 2


def test_nothing_is_added_by_a_step_that_fails() -> None:
    agg = make("fedavg", {}, max_norm="adaptive")
    rejected(agg, 1.0, 2.0)
    before = agg.state_dict()
    for bad in (math.nan, 1e39):
        with pytest.raises(ValueError):
            agg.step(torch.full((D,), 3.3e38), rows_of(3e38, 3e38, bad), [0, 1, 2])
    for key, value in agg.state_dict().items():
        assert torch.equal(value, before[key])


def test_rows_near_the_end_of_float32_do_not_count() -> None:
    agg = make("mifa", {}, nonfinite="drop")
    assert rejected(agg, 1.0, 2.0, 3e38, 3e37, 3e36) == [2, 3, 4]
    assert agg.state_dict()["norms"][:3].tolist() == [1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("key", "place", "value", "match"),
    [
        ("norms", 0, -1.0, "norms.*: expected numbers in"),
        ("norms", 0, math.inf, "norms.*: expected finite values"),
        ("norms", 0, 0.0, "norms.*: expected 2 norms > 0, then zeros"),
        ("norms", 5, 1.0, "norms.*: expected 2 norms > 0, then zeros"),
        ("norm_count", 0, -1, "norm_count.*: expected numbers in"),
        ("norm_count", 0, 3, "norms.*: expected 3 norms > 0, then zeros"),
    ],
)
def test_impossible_states_are_refused(key: str, place: int, value: float, match: str) -> None:
    agg = make("krum", {}, max_norm="adaptive")
    rejected(agg, 1.0, 2.0)
    state = agg.state_dict()
    state[key].reshape(-1)[place] = value
    with pytest.raises(ValueError, match=match):
        agg.load_state_dict(state)


OTHER: list[Any] = [None, 3.0, AdaptiveNorm(multiple=3.0), AdaptiveNorm(window=9, warmup=3)]


@pytest.mark.parametrize("before", ["adaptive", None])
@pytest.mark.parametrize("value", [*OTHER, "adaptive"])
def test_a_file_is_loaded_with_another_bound_as_if_it_was_set(
    before: Any, value: Any, tmp_path: Path
) -> None:
    """An adaptive bound begins anew, unless it is equal."""
    agg = make("mifa", {}, max_norm=before)
    rejected(agg, 1.0, 2.0)
    agg.save(tmp_path / "agg")
    loaded = fastagg.load(tmp_path / "agg", max_norm=value)
    agg.max_norm = value
    assert loaded.max_norm == agg.max_norm
    state, expected = loaded.state_dict(), agg.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    if "norm_count" in state:
        assert int(state["norm_count"]) == (2 if value == before else 0)


def test_a_file_without_a_bound_gets_the_default_of_drop(tmp_path: Path) -> None:
    make("mifa", {}).save(tmp_path / "raise")
    make("mifa", {}, nonfinite="drop", max_norm=None).save(tmp_path / "drop")
    path = tmp_path / "raise"
    assert fastagg.load(path, nonfinite="drop").max_norm == AdaptiveNorm()
    assert fastagg.load(path, nonfinite="drop", max_norm=None).max_norm is None
    assert fastagg.load(path, nonfinite="drop", max_norm=2.0).max_norm == 2.0
    assert fastagg.load(path).max_norm is None
    for options in ({}, {"nonfinite": "drop"}, {"nonfinite": "raise"}):
        assert fastagg.load(tmp_path / "drop", **options).max_norm is None
    noise: dict[str, Any] = {"clip_norm": 1.0, "noise_multiplier": 1.0}
    make("fedavg", {}, **noise).save(tmp_path / "noise")
    assert fastagg.load(tmp_path / "noise", nonfinite="drop").max_norm is None


def test_a_plan_counts_the_norms() -> None:
    sizes: dict[str, Any] = {"num_clients": 10, "num_active": 5, "num_params": 100}
    plain = fastagg.plan("fedavg", **sizes)
    found = fastagg.plan("fedavg", **sizes, nonfinite="drop")
    assert found.state_bytes - plain.state_bytes == 8 * 256 + 8
    assert found.bytes_moved > plain.bytes_moved
    assert fastagg.plan("fedavg", **sizes, nonfinite="drop", max_norm=None) == plain


def test_enqueued_rounds_have_no_adaptive_bound() -> None:
    agg = fastagg.FDMS(num_clients=K, num_params=D, max_norm="adaptive")
    with pytest.raises(ValueError, match="expected a number or None as max_norm"):
        EnqueuedFDMS(agg, torch.zeros(D))


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("auto-adaptive", TypeError),
        ({"multiple": 1.0}, ValueError),
        ({"multiple": math.inf}, ValueError),
        ({"window": 2}, ValueError),
        ({"window": 2**40}, ValueError),
        ({"warmup": 300}, ValueError),
        ({"warmup": -1}, ValueError),
        ({"factor": 2.0}, ValueError),
        ({"kind": "Other"}, ValueError),
        ({"multiple": "3"}, TypeError),
    ],
)
def test_bad_options(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_norm"):
        make("fedavg", {}, max_norm=value)
