# SPDX-License-Identifier: Apache-2.0
"""``clip_norm``: longer rows are scaled down to a bound, under every rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import AdaptiveClip, Aggregator
from tests.rules.conftest import as_form

K, D = 6, 23
CLIP = 4.0  # rows of D standard normal numbers have norms of about 4.8
Check = Callable[..., None]
clipping_rule = pytest.mark.clipping_rule
exact_rule = pytest.mark.exact_rule
few_examples = settings(max_examples=max(3, settings.default.max_examples // 3))


def make(name: str, options: dict[str, Any], **more: Any) -> Aggregator:
    return fastagg.make(name, num_clients=K, num_params=D, **(options | more))


def rounds(count: int, seed: int = 11) -> list[tuple[Tensor, list[int]]]:
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        clients = torch.randperm(K, generator=generator)[:4].tolist()
        scales = 2.0 * torch.rand(4, 1, generator=generator)
        found.append((scales * torch.randn(4, D, generator=generator), clients))
    return found


def by_hand(rows: Tensor, bound: float) -> Tensor:
    """Return the rows scaled down, computed without the library."""
    norms = rows.double().square().sum(dim=1).sqrt()
    factors = (bound / norms).clamp(max=1.0).tolist()
    return torch.stack([row * factor for row, factor in zip(rows, factors, strict=True)])


def test_hand_worked() -> None:
    agg, params = fastagg.FedAvg(num_clients=3, num_params=2, clip_norm=5.0), torch.zeros(2)
    # (6, 8) has the norm 10 and becomes (3, 4); (1, 0) stays
    report = agg.step(params, torch.tensor([[6.0, 8.0], [1.0, 0.0]]), [2, 0])
    assert params.tolist() == [2.0, 2.0]
    assert report.clipped is not None and report.clipped.tolist() == [2]
    assert report.clip_norm == 5.0
    assert report.weights.tolist() == [0.5, 0.25]  # the factors of the rows as they came


@clipping_rule
def test_a_step_is_that_with_rows_that_were_scaled_down_before(
    same_state: Check, name: str, options: dict[str, Any]
) -> None:
    # Norms differ in their last bits, so that rows do by 2^-23; MimiC and SCAFFOLD add up errors of
    # rounds, robust rules subtract rows from each other. An int8 number may be the next of 254.
    tolerance = 1e-2 if options.get("memory_dtype") == "int8" else 2e-5
    agg, twin_agg = make(name, options, clip_norm=CLIP), make(name, options)
    params, twin = torch.zeros(D), torch.zeros(D)
    for rows, clients in rounds(6):
        report = agg.step(params, rows, clients)
        expected = twin_agg.step(twin, by_hand(rows, CLIP), clients)
        long = sorted(k for k, row in zip(clients, rows, strict=True) if float(row.norm()) > CLIP)
        assert report.clipped is not None and report.clipped.tolist() == long
        assert report.active.tolist() == expected.active.tolist()
        assert not report.rejected.numel()
        assert (params - twin).abs().max() <= tolerance * twin.abs().max()


@clipping_rule
def test_a_row_too_long_to_scale_is_refused(
    same_state: Check, name: str, options: dict[str, Any]
) -> None:
    """Its factor, 1.4e-43, would be a denormal number of 2 digits: 100 times 2^-149."""
    agg, twin_agg = make(name, options, clip_norm=1e-4), make(name, options, clip_norm=1e-4)
    params, twin = torch.zeros(D), torch.zeros(D)
    for rows, clients in rounds(2):
        hostile = next(k for k in range(K) if k not in clients)
        twin_agg.step(twin, rows, clients)
        report = agg.step(
            params, torch.cat([torch.full((1, D), 1.5e38), rows]), [hostile, *clients]
        )
        assert report.reasons == {
            hostile: "norm 7.194e+38 is more than 8.5e+37 times clip_norm = 0.0001"
        }
        assert torch.equal(params, twin)
    same_state(agg, twin_agg)


def test_follows_the_oracle() -> None:
    weights = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    agg = make("fedavg", {"client_weights": weights, "server_lr": 0.7}, clip_norm=CLIP)
    params = torch.zeros(D)
    for rows, clients in rounds(20):
        u, w = rows.double().numpy(), np.array([weights[k] for k in clients])
        factors = np.minimum(1.0, CLIP / np.sqrt((u * u).sum(axis=1)))
        expected = params.double().numpy() + 0.7 * (w * factors / w.sum()) @ u
        agg.step(params, rows, clients)
        # roundings of the norm (23 squares in float32), the aggregate and the parameters
        assert np.abs(params.numpy() - expected).max() <= 8 * 2.0**-24 * np.abs(expected).max()


@clipping_rule
def test_a_bound_that_no_row_exceeds_changes_no_bit(
    same_bits: Check, same_state: Check, name: str, options: dict[str, Any]
) -> None:
    agg, twin_agg = make(name, options, clip_norm=1e6), make(name, options)
    params, twin = torch.zeros(D), torch.zeros(D)
    for rows, clients in rounds(5):
        report, expected = agg.step(params, rows, clients), twin_agg.step(twin, rows, clients)
        same_bits(params, twin)
        same_state(agg, twin_agg)
        same_bits(report.weights, expected.weights)
        assert report.clipped is not None and not report.clipped.numel()
        assert expected.clipped is None and expected.clip_norm is None


@clipping_rule
@few_examples
@given(data=st.data())
def test_any_order_and_form_gives_the_same_bits(
    same_bits: Check,
    same_state: Check,
    name: str,
    options: dict[str, Any],
    data: st.DataObject,
) -> None:
    seed = data.draw(st.integers(0, 1000), "seed")
    order = data.draw(st.permutations(range(4)), "order")
    results = []
    for form in ("matrix", "list", "buffer", "stream"):
        agg, params = make(name, options, clip_norm={"initial": 3.0}), torch.zeros(D)
        for rows, clients in rounds(3, seed):
            rows, clients = rows[list(order)], [clients[i] for i in order]
            before = rows.clone()
            agg.step(params, as_form(form, rows, clients, K), clients)
            same_bits(rows, before)
        results.append((agg, params))
    for agg, params in results[1:]:
        same_bits(params, results[0][1])
        same_state(agg, results[0][0])


def test_rejected_rows_are_judged_before() -> None:
    agg = make("fedavg", {}, clip_norm=CLIP, max_norm=100.0, nonfinite="drop")
    params, rows = torch.zeros(D), torch.ones(4, D)
    rows[0] *= 1000.0
    rows[2, 3] = math.nan
    rows[3] *= 10.0
    report = agg.step(params, rows, [0, 1, 2, 3])
    assert report.rejected.tolist() == [0, 2] and report.active.tolist() == [1, 3]
    assert report.reasons[0].startswith("norm 4795.83, but max_norm is 100")
    assert report.clipped is not None and report.clipped.tolist() == [1, 3]


@clipping_rule
def test_a_refused_step_changes_nothing(
    same_bits: Check, name: str, options: dict[str, Any]
) -> None:
    agg, params = make(name, options, clip_norm="adaptive"), torch.randn(D)
    agg.step(params, torch.randn(4, D), [0, 1, 2, 3])
    state, before = agg.state_dict(), params.clone()
    rows = torch.randn(3, D)
    rows[1, 5] = math.inf
    with pytest.raises(ValueError, match=r"client\(s\) \[2\]"):
        agg.step(params, rows, [5, 2, 0])
    same_bits(params, before)
    for key, value in agg.state_dict().items():
        same_bits(value, state[key], key)


@clipping_rule
def test_rows_of_a_buffer_stay_if_the_step_is_refused(name: str, options: dict[str, Any]) -> None:
    agg, buffer = make(name, options, clip_norm=1.0), fastagg.UpdateBuffer(K, D)
    for client in range(3):
        buffer.row(client).fill_(5.0)
    buffer.row(2)[3] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        agg.step(torch.zeros(D), buffer, [0, 1, 2])
    assert (buffer.row(0) == 5.0).all() and (buffer.row(1) == 5.0).all()


# --- the adaptive bound -----------------------------------------------------------------------


def test_the_bound_follows_the_paper() -> None:
    agg = make("fedavg", {}, clip_norm=AdaptiveClip(initial=2.0, quantile=0.75, rate=0.5))
    params, bound = torch.zeros(D), 2.0
    for t, (rows, clients) in enumerate(rounds(30)):
        report = agg.step(params, rows, clients)
        assert report.clip_norm == pytest.approx(bound, rel=1e-12), t
        part = sum(float(row.double().norm()) <= bound for row in rows) / 4
        bound *= math.exp(-0.5 * (part - 0.75))
        assert agg.state_dict()["clip_bound"].item() == pytest.approx(bound, rel=1e-12)
    agg.step(params, torch.zeros(0, D), [])  # a skipped round
    assert agg.state_dict()["clip_bound"].item() == pytest.approx(bound, rel=1e-12)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
def test_the_bound_finds_the_quantile(quantile: float) -> None:
    agg = fastagg.make(
        "fedavg", num_clients=100, num_params=1, clip_norm=AdaptiveClip(1e-3, quantile)
    )
    rows = torch.linspace(1.0, 2.0, 100)[:, None]
    for _ in range(200):
        report = agg.step(torch.zeros(1), rows, range(100))
    assert report.clip_norm is not None
    assert abs(report.clip_norm - (1.0 + quantile)) <= 0.05  # within the steps of the bound


def test_the_count_may_have_noise() -> None:
    agg = make("fedavg", {}, clip_norm=AdaptiveClip(initial=1.0, rate=1.0, count_noise=3.0))
    bounds = set()
    for _ in range(5):
        agg.step(torch.zeros(D), torch.randn(4, D), [0, 1, 2, 3])
        bounds.add(round(math.log(agg.state_dict()["clip_bound"].item()), 3))
    assert len(bounds) == 5


@pytest.mark.parametrize("factor", [1.0, 1e30])
@pytest.mark.parametrize("quantile", [0.0, 1.0])
def test_any_rate_leaves_the_bound_in_its_range(quantile: float, factor: float) -> None:
    clip = AdaptiveClip(initial=0.1, quantile=quantile, rate=1000.0 * factor, count_noise=factor)
    agg = make("fedavg", {}, clip_norm=clip)
    for row in (torch.ones(D), torch.full((D,), 1e-31)):
        report = agg.step(torch.zeros(D), row.expand(4, D), [0, 1, 2, 3])
        assert report.clip_norm is not None and 1e-30 <= report.clip_norm <= 1e30
    assert 1e-30 <= agg.state_dict()["clip_bound"].item() <= 1e30


def test_a_rate_may_take_the_bound_to_its_end() -> None:
    agg = make("fedavg", {}, clip_norm=AdaptiveClip(initial=0.1, quantile=1.0, rate=1000.0))
    agg.step(torch.zeros(D), torch.ones(3, D), [0, 1, 2])  # all are longer: 0.1 exp(1000)
    assert agg.state_dict()["clip_bound"].item() == 1e30


@pytest.mark.parametrize("name", ["amplified", "mifa"])
def test_a_round_in_which_all_rows_are_refused_leaves_the_bound(name: str) -> None:
    """Rows pass the norms, so that a next bound is known, and are refused later."""
    options: dict[str, Any] = {"beta": 1e6} if name == "amplified" else {}
    options |= {"nonfinite": "drop", "max_norm": None, "min_active": 3}
    if name == "mifa":
        options |= {"server_lr": 1e6}
    agg = make(name, options, clip_norm=AdaptiveClip(initial=1e28))
    before = agg.state_dict()["clip_bound"].item()
    report = agg.step(torch.zeros(D), torch.full((3, D), 1e26), range(3))
    assert report.rejected.tolist() == [0, 1, 2]
    assert report.skipped is (name == "amplified")
    assert agg.state_dict()["clip_bound"].item() == before


@clipping_rule
def test_a_checkpoint_goes_on_bit_identically(
    same_bits: Check, same_state: Check, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    agg, params = make(name, options, clip_norm=AdaptiveClip(initial=3.0)), torch.zeros(D)
    steps = rounds(5)
    for rows, clients in steps[:3]:
        agg.step(params, rows, clients)
    agg.save(tmp_path / "agg")
    loaded, twin = fastagg.load(tmp_path / "agg"), params.clone()
    assert loaded.clip_norm == agg.clip_norm
    for rows, clients in steps[3:]:
        agg.step(params, rows, clients)
        loaded.step(twin, rows, clients)
    same_bits(params, twin)
    same_state(agg, loaded)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e31, math.nan])
def test_a_forged_bound_is_refused(value: float) -> None:
    agg = make("fedavg", {}, clip_norm="adaptive")
    with pytest.raises(ValueError, match="clip_bound"):
        agg.load_state_dict({"clip_bound": torch.tensor(value, dtype=torch.float64)})
    assert agg.state_dict()["clip_bound"].item() == 0.1


@pytest.mark.parametrize("before", [AdaptiveClip(initial=3.0), 1.0, None])
@pytest.mark.parametrize("value", [AdaptiveClip(initial=3.0), AdaptiveClip(initial=5.0), 2.0, None])
def test_a_file_is_loaded_with_another_bound_as_if_it_was_set(
    before: Any, value: Any, tmp_path: Path
) -> None:
    """An adaptive bound begins anew, unless it is equal."""
    agg, params = make("fedavg", {}, clip_norm=before), torch.zeros(D)
    for rows, clients in rounds(3):
        agg.step(params, rows, clients)
    agg.save(tmp_path / "agg")
    loaded = fastagg.load(tmp_path / "agg", clip_norm=value)
    agg.clip_norm = value
    assert loaded.clip_norm == agg.clip_norm == value
    state = loaded.state_dict()
    assert state == agg.state_dict()
    if isinstance(value, AdaptiveClip):
        assert (state["clip_bound"].item() == value.initial) is (value != before)


BAD: list[tuple[Any, type[Exception]]] = [
    (0.0, ValueError),
    (-1.0, ValueError),
    (math.nan, ValueError),
    (math.inf, ValueError),
    (True, TypeError),
    ("auto", TypeError),
    ({"first": 1.0}, ValueError),
    ({"kind": "AdaptiveNorm"}, ValueError),
    ({"initial": 0.0}, ValueError),
    ({"initial": 1e31}, ValueError),
    ({"quantile": 1.5}, ValueError),
    ({"rate": -1.0}, ValueError),
    ({"count_noise": math.inf}, ValueError),
]


@pytest.mark.parametrize(("value", "error"), BAD)
def test_bad_values_are_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^clip_norm: "):
        make("fedavg", {}, clip_norm=value)
    agg = make("fedavg", {}, clip_norm=2.0)
    with pytest.raises(error, match=r"^clip_norm: "):
        agg.clip_norm = value
    assert agg.clip_norm == 2.0


def test_setting_an_equal_bound_keeps_what_it_has_learnt() -> None:
    agg = make("fedavg", {}, clip_norm=AdaptiveClip(initial=1.0))
    agg.step(torch.zeros(D), torch.randn(4, D), [0, 1, 2, 3])
    learnt = agg.state_dict()["clip_bound"].item()
    agg.clip_norm = {"initial": 1.0}
    assert agg.state_dict()["clip_bound"].item() == learnt != 1.0
    agg.clip_norm = {"initial": 2.0}
    assert agg.state_dict()["clip_bound"].item() == 2.0
