# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastagg_sim.seeds import derive, first_of_order, generator, numpy_generator, uniform

names = st.lists(st.one_of(st.text(max_size=5), st.integers(-(2**70), 2**70)), max_size=4)


def test_known_values() -> None:
    # Pinned: a change of these would change every published result.
    assert derive(0) == 6197007067532723406
    assert derive(0, "batches", 3, 7) == 2554292621350499299
    assert torch.randperm(6, generator=generator(1, "dropout", 2)).tolist() == [1, 0, 2, 4, 3, 5]
    assert numpy_generator(1, "data").randint(0, 1000, 3).tolist() == [984, 650, 27]
    assert uniform(0, "latency", 3, 7) == 0.9705801701425364


@given(st.integers(), names, st.integers(), names)
def test_streams_differ_unless_named_alike(
    seed: int, stream: list[str | int], other_seed: int, other: list[str | int]
) -> None:
    same = (seed, stream) == (other_seed, other)
    assert (derive(seed, *stream) == derive(other_seed, *other)) == same
    assert 0 <= derive(seed, *stream) < 2**63


def test_neighbouring_names_are_different_streams() -> None:
    seeds = {
        derive(1, 2, 3),
        derive(12, 3),
        derive(1, 23),
        derive(1, "2", 3),
        derive(1, "23"),
        derive(1, "2", "3"),
        derive(-1, 23),
        derive(1),
    }
    assert len(seeds) == 8


def test_integers_of_numpy_and_torch_count_as_integers() -> None:
    assert derive(np.int64(4), "a", np.int32(2)) == derive(4, "a", 2)
    assert derive(4, "a", torch.tensor(2)) == derive(4, "a", 2)


def test_the_global_random_state_is_not_touched() -> None:
    before = torch.random.get_rng_state()
    torch.rand(3, generator=generator(0, "data"))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("bad", [1.0, "1", None, True])
def test_a_seed_is_an_integer(bad: object) -> None:
    with pytest.raises(TypeError, match="seed: expected an integer"):
        derive(bad)  # type: ignore[arg-type]


def test_a_name_is_a_string_or_an_integer() -> None:
    with pytest.raises(
        TypeError, match=r"names: expected strings and integers, got 1\.5 \(float\)"
    ):
        derive(0, 1.5)  # type: ignore[arg-type]


@given(count=st.integers(1, 300), seed=st.integers(0, 2**32), data=st.data())
def test_the_first_of_few_numbers_are_those_of_a_permutation(
    count: int, seed: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(0, count))
    found = first_of_order(count, chosen, generator(seed))
    assert torch.equal(found, torch.randperm(count, generator=generator(seed))[:chosen])


@pytest.mark.parametrize(("count", "chosen"), [(8192, 1), (10**5, 1000), (10**12, 3), (8192, 4096)])
def test_the_first_of_many_numbers_are_distinct(count: int, chosen: int) -> None:
    found = first_of_order(count, chosen, generator(0))
    assert found.dtype == torch.int64 and found.shape == (chosen,)
    assert len(found.unique()) == chosen
    assert 0 <= int(found.min()) <= int(found.max()) < count
    assert torch.equal(found, first_of_order(count, chosen, generator(0)))
    assert not torch.equal(found, first_of_order(count, chosen, generator(1)))


@pytest.mark.slow
def test_orders_of_many_numbers_are_uniform() -> None:
    """Each number is as likely in each place: 5 standard deviations of a binomial in every cell."""
    count, chosen, draws = 8192, 64, 2000
    orders = torch.stack([first_of_order(count, chosen, generator(s)) for s in range(draws)])
    blocks = orders * 16 // count  # [draws, chosen], in 16 blocks of 512 numbers
    for place in (0, 1, 31, 63):
        counts = torch.bincount(blocks[:, place], minlength=16).double()
        assert (counts - draws / 16).abs().max() < 5 * (draws / 16 * 15 / 16) ** 0.5
    ascending = (orders[:, 0] < orders[:, -1]).double().mean()
    assert abs(ascending - 0.5) < 5 * (0.25 / draws) ** 0.5


def test_uniform_numbers() -> None:
    """Mean, variance and a correlation between neighbouring streams, within five standard errors,
    and the extreme values."""
    n = 20_000
    x = torch.tensor([uniform(5, "u", k) for k in range(n)], dtype=torch.float64)
    assert x.min() > 0 and x.max() < 1
    assert abs(x.mean() - 1 / 2) < 5 / (12 * n) ** 0.5
    assert abs((x - 1 / 2).square().mean() - 1 / 12) < 5 / (180 * n) ** 0.5
    assert abs(((x[1:] - 1 / 2) * (x[:-1] - 1 / 2)).mean()) < 5 / 12 / n**0.5
