# SPDX-License-Identifier: Apache-2.0
"""``grow``, and the state of a rule with few clients as that of a rule with more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import Aggregator, UpdateBuffer
from fastagg.churn import widened_state
from fastagg.memory.rows import RowMemory

K, MORE, D = 6, 11, 23
every_rule = pytest.mark.every_rule
exact_rule = pytest.mark.exact_rule
SUMS = {"total", "mean_control"}  # over clients
Rounds = Callable[..., Iterator[tuple[Tensor, Tensor]]]
Check = Callable[..., None]


def wider(options: dict[str, Any]) -> dict[str, Any]:
    weights = options.get("client_weights")
    return {} if weights is None else {"client_weights": [*weights, 1, 2, 3, 4, 5]}


def trained(name: str, options: dict[str, Any], rounds: Rounds) -> tuple[Aggregator, Tensor]:
    agg = fastagg.make(name, num_clients=K, num_params=D, **options)
    params = torch.randn(D, generator=torch.Generator().manual_seed(1))
    for updates, clients in rounds(K, D, 12, 7):
        agg.step(params, updates, clients)
    return agg, params


@exact_rule
@pytest.mark.parametrize("how", ["grow", "widened_state"])
def test_old_clients_keep_their_state_and_new_ones_have_none(
    name: str, options: dict[str, Any], random_rounds: Rounds, same_bits: Check, how: str
) -> None:
    few, params = trained(name, options, random_rounds)
    many = fastagg.make(name, num_clients=MORE, num_params=D, **(options | wider(options)))
    before, first = few.state_dict(), many.state_dict()
    if how == "grow":
        report, committed = few.last_report, few.committed
        few.grow(MORE, **wider(options))
        many = few
        assert many.num_clients == MORE
        assert (many.last_report, many.committed) == (report, committed)
        assert repr(many).startswith(f"{type(many).__name__}(num_clients={MORE}, ")
        again = fastagg.make(name, num_clients=MORE, num_params=D, **(options | wider(options)))
        again.load_state_dict(many.state_dict())  # which checks that steps lead to it
    else:
        many.load_state_dict(widened_state(many, before, K))
    after = many.state_dict()
    for key, value in before.items():
        old, new, none = value, after[key], first[key]
        if key == "candidates":
            old, new, none = (
                fastagg.bits.unpack(v, n) for v, n in ((old, K), (new, MORE), (none, MORE))
            )
        if key in SUMS:
            continue
        place = tuple(slice(n) for n in old.shape)
        same_bits(new[place], old, key)
        if new.shape != old.shape:
            same_bits(new[K:], none[K:], key)
            if new.dim() == 2 and new.shape[-1] == MORE:
                same_bits(new[:, K:], none[:, K:], key)
    if name == "mifa-client":
        same_bits(after["total"], before["total"])
    elif "total" in before:
        rest = many._shares @ after["memory"].double()  # type: ignore[attr-defined]
        assert torch.allclose(after["total"], rest, rtol=1e-12, atol=1e-14)
    if "mean_control" in before:
        mean = after["controls"].double().mean(dim=0)
        assert torch.allclose(after["mean_control"].double(), mean, rtol=1e-6, atol=1e-7)
    many.step(params, torch.ones(4, D), [0, 2, K, MORE - 1])
    assert torch.isfinite(params).all()


@every_rule
def test_after_growing_a_checkpoint_goes_on_with_the_same_bits(
    name: str,
    options: dict[str, Any],
    random_rounds: Rounds,
    same_bits: Check,
    same_state: Check,
    tmp_path: Path,
) -> None:
    agg, params = trained(name, options, random_rounds)
    agg.grow(MORE, **wider(options))
    most = options.get("buffer_size", MORE)  # rows of a step
    for updates, clients in random_rounds(MORE, D, 3, 8):
        agg.step(params, updates[:most], clients[:most])
    agg.save(tmp_path / "rule", params=params)
    twin = torch.zeros(D)
    again = fastagg.load(tmp_path / "rule", params=twin)
    assert again.num_clients == MORE
    for updates, clients in random_rounds(MORE, D, 4, 9):
        agg.step(params, updates[:most], clients[:most])
        again.step(twin, updates[:most], clients[:most])
    same_bits(params, twin)
    same_state(agg, again)


@every_rule
def test_what_is_refused_changes_nothing(
    name: str, options: dict[str, Any], random_rounds: Rounds, same_bits: Check
) -> None:
    agg, params = trained(name, options, random_rounds)
    before, shown = agg.state_dict(), repr(agg)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"num_clients": K - 1}, ValueError, f"num_clients: expected at least {K}"),
        ({"num_clients": 0}, ValueError, "num_clients"),
        ({"num_clients": 7.5}, TypeError, "num_clients"),
        ({"num_clients": MORE, "server_lr": 1.0}, TypeError, "options: .*server_lr"),
        ({"num_clients": MORE, "client_weights": [1.0]}, (ValueError, TypeError), "client_weights"),
    ]
    if "client_weights" in options:
        wrong.append(({"num_clients": MORE}, ValueError, f"expected {MORE} values for the clients"))
    for arguments, error, message in wrong:
        with pytest.raises(error, match=message):
            agg.grow(**arguments)
    assert repr(agg) == shown
    for key, value in agg.state_dict().items():
        same_bits(value, before[key], key)
    twin, other = trained(name, options, random_rounds)
    for updates, clients in random_rounds(K, D, 2, 3):
        agg.step(params, updates, clients)
        twin.step(other, updates, clients)
    same_bits(params, other)


@every_rule
def test_growing_by_no_client_changes_no_bit(
    name: str, options: dict[str, Any], random_rounds: Rounds, same_bits: Check, same_state: Check
) -> None:
    agg, params = trained(name, options, random_rounds)
    twin, other = trained(name, options, random_rounds)
    agg.grow(K)
    for updates, clients in random_rounds(K, D, 4, 5):
        agg.step(params, updates, clients)
        twin.step(other, updates, clients)
    same_bits(params, other)
    same_state(agg, twin)


@pytest.mark.parametrize("name", ["mifa", "stale", "stale-models", "mimic"])
def test_rows_are_not_copied(name: str, tmp_path: Path) -> None:
    """Also rows that the rule owns, with references, and rows in a file."""
    for options in ({}, {"memory_folder": tmp_path}):
        agg, buffer = fastagg.make(name, num_clients=3, num_params=D, **options), UpdateBuffer(3, D)
        twin = fastagg.make(name, num_clients=5, num_params=D)
        params, other = torch.zeros(D), torch.zeros(D)
        for clients in ([0, 1], [2, 1], [0]):
            rows = buffer.rows(clients)
            for row in rows:
                row.normal_()
            twin.step(other, [row.clone() for row in rows], clients)
            agg.step(params, buffer, clients)
        memory = agg.corrections if name == "mimic" else agg.memory  # type: ignore[attr-defined]
        assert isinstance(memory, RowMemory)
        places = [row.data_ptr() for row in memory.rows]
        agg.grow(5)
        memory = agg.corrections if name == "mimic" else agg.memory  # type: ignore[attr-defined]
        assert [row.data_ptr() for row in memory.rows[:3]] == places
        assert memory.store.folder == options.get("memory_folder")
        # Before, means were over three clients under mifa, and not over five.
        params.copy_(other)
        for clients in ([3, 1], [4], [0, 2]):
            updates = torch.randn(len(clients), D)
            agg.step(params, updates, clients)
            twin.step(other, updates, clients)
        # The totals were summed in another order: a float64 rounding, then one to float32.
        torch.testing.assert_close(params, other, rtol=2.0**-22, atol=2.0**-22)


@given(data=st.data())
def test_coming_and_going_is_as_in_a_rule_of_the_final_size(data: st.DataObject) -> None:
    """Growth, absence, and ids that go to others, under rules whose equations have no 1/K."""
    name = data.draw(st.sampled_from(["stale", "mimic", "fdms-means", "stale-models"]))
    agg = fastagg.make(name, num_clients=2, num_params=5)
    twin = fastagg.make(name, num_clients=8, num_params=5)
    params, other, size = torch.zeros(5), torch.zeros(5), 2
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    for _ in range(data.draw(st.integers(1, 8))):
        what = data.draw(st.sampled_from(["grow", "forget", "step", "step"]))
        if what == "grow":
            size = data.draw(st.integers(size, 8))
            agg.grow(size)
        elif what == "forget":
            ids = sorted(data.draw(st.sets(st.integers(0, size - 1))))
            agg.forget(ids)
            twin.forget(ids)
        else:
            clients = sorted(data.draw(st.sets(st.integers(0, size - 1))))
            updates = torch.randn(len(clients), 5, generator=g)
            agg.step(params, updates, clients)
            twin.step(other, updates, clients)
            if name == "fdms-means":  # its shares are 1/K; what it remembers does not depend on K
                other.copy_(params)
            # Eight rounds; a total is summed anew when the rule grows.
            torch.testing.assert_close(params, other, rtol=1e-5, atol=1e-5)
    agg.grow(8)
    for key, value in agg.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[key], rtol=1e-5, atol=1e-5)


def test_no_memory_or_a_full_disk_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, same_state: Check
) -> None:
    agg, twin = (
        fastagg.make("stale-models", num_clients=3, num_params=D, memory_folder=tmp_path)
        for _ in range(2)
    )
    params, other = torch.zeros(D), torch.zeros(D)
    updates = torch.randn(2, D)
    for rule, vector in ((agg, params), (twin, other)):
        rule.step(vector, updates, [0, 2])

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(type(agg), "_state_loaded", fail)  # the last thing that can fail
        with pytest.raises(MemoryError):
            agg.grow(MORE)
    assert agg.num_clients == 3
    for rule, vector in ((agg, params), (twin, other)):
        rule.step(vector, updates, [1, 2])
    same_state(agg, twin)
    assert torch.equal(params, other)


def test_weights_of_the_new_clients() -> None:
    agg = fastagg.make("fedavg", num_clients=2, num_params=1, client_weights=[1.0, 3.0])
    agg.grow(3, client_weights=[1.0, 3.0, 5.0])
    report = agg.step(torch.zeros(1), torch.ones(2, 1), [1, 2])
    assert report.weights.tolist() == [3 / 8, 5 / 8]
    # amplified does not divide weights by their sum: 1/K by default, others as they were given
    agg = fastagg.make("amplified", num_clients=2, num_params=1)
    agg.grow(4)
    assert agg.step(torch.zeros(1), torch.ones(1, 1), [3]).weights.tolist() == [0.25]
    agg = fastagg.make("amplified", num_clients=2, num_params=1, client_weights=[0.125, 0.125])
    agg.grow(4)
    assert agg.step(torch.zeros(1), torch.ones(1, 1), [3]).weights.tolist() == [0.125]


def test_weights_of_present_clients_stay_where_only_they_could_apply_them() -> None:
    agg = fastagg.make("mifa-client", num_clients=2, num_params=1, client_weights=[1.0, 3.0])
    with pytest.raises(ValueError, match="same weights for the present clients"):
        agg.grow(3, client_weights=[2.0, 6.0, 1.0])
    agg.grow(3, client_weights=[1.0, 3.0, 4.0])
    params = torch.zeros(1)
    agg.step(params, torch.ones(1, 1), [2])
    assert params.tolist() == [0.5]


def test_an_enqueued_rule_that_grew_is_refused() -> None:
    agg, params = fastagg.FDMS(num_clients=2, num_params=1), torch.zeros(1)
    queue = fastagg.EnqueuedFDMS(agg, params)
    agg.grow(3)
    with pytest.raises(ValueError, match="make another EnqueuedFDMS"):
        queue.enqueue(torch.ones(1, 1), torch.tensor([0]))


def test_a_wider_mimic_goes_on_as_before(same_bits: Callable[..., None]) -> None:
    few, many = (fastagg.make("mimic", num_clients=k, num_params=3) for k in (2, 4))
    one, other = torch.zeros(3), torch.zeros(3)
    rows = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, -1.0]])
    few.step(one, rows, [0, 1])
    other.copy_(one)
    many.load_state_dict(widened_state(many, few.state_dict(), 2))
    for rule, params in ((few, one), (many, other)):
        rule.step(params, rows[:1], [1])
    same_bits(one, other)


def test_the_last_aggregate_is_kept_for_clients_that_learn_it_later(same_bits: Check) -> None:
    agg, params = fastagg.MimiC(num_clients=2, num_params=3, mode="client"), torch.zeros(3)
    for row in ([1.0, 2.0, 3.0], [3.0, -2.0, 1.0]):
        agg.step(params, torch.tensor([row]), [1])
    agg.step(params, [], [])
    agg.grow(4)
    same_bits(agg.aggregate, torch.tensor([3.0, -2.0, 1.0]))
    agg.step(params, [agg.aggregate + 1.0, torch.zeros(3)], [0, 3])
    same_bits(agg.aggregate, torch.tensor([2.0, -0.5, 1.0]))


@pytest.mark.parametrize("name", ["krum", "centered-clip", "bucketing"])
def test_the_number_of_rounds_is_kept(name: str) -> None:
    """Also where it is not part of the state."""
    agg = fastagg.make(name, num_clients=K, num_params=D)
    for _ in range(3):
        agg.step(torch.zeros(D), torch.randn(K, D), range(K))
    agg.grow(MORE)
    assert agg.rounds.item() == 3  # type: ignore[attr-defined]


def test_other_states_are_refused() -> None:
    few, many = (fastagg.make("fdms", num_clients=k, num_params=3) for k in (2, 4))
    with pytest.raises(ValueError, match=r"state\['scores'\]: expected at most shape \[2, 2\]"):
        widened_state(few, many.state_dict(), 4)
    with pytest.raises(ValueError, match="expected the tensors"):
        widened_state(many, {}, 2)


def test_equal_weights_may_become_unequal_ones() -> None:
    options: dict[str, Any] = {"num_clients": 2, "num_params": 3, "client_weights": [2.0, 2.0]}
    here, there = fastagg.make("mifa", **options), fastagg.make("mifa-client", **options)
    weights, ids = [2.0, 2.0, 5.0], [0, 1, 2]
    first, second, params, other = torch.randn(2, 3), torch.randn(3, 3), *torch.zeros(2, 3)
    here.step(params, first, ids[:2])
    there.step(other, first, ids[:2])  # differences to rows of zeros
    here.grow(3, client_weights=weights)
    there.grow(3, client_weights=weights)
    here.step(params, second, ids)
    there.step(other, second - torch.cat([first, torch.zeros(1, 3)]), ids)
    mean = (torch.tensor(weights) @ second) / sum(weights)
    torch.testing.assert_close(params, first.mean(0) + mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(other, params, rtol=1e-6, atol=1e-6)
