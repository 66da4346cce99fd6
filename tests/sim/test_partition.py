# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastagg_sim.partition import PARTITIONS, Partition, partition
from fastagg_sim.partition.base import Counted, Drawn, IndexSets, Ranges, shuffled
from fastagg_sim.partition.shards import _deal_distinct
from fastagg_sim.seeds import generator


def labels_of(*counts: int, seed: int = 0) -> torch.Tensor:
    """Shuffled labels: counts[c] samples of class c."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]


def assert_disjoint(split: Partition, num_samples: int) -> None:
    used = split.clients.joined()
    assert used.dtype == torch.int64
    assert len(torch.unique(used)) == len(used)
    assert 0 <= int(used.min()) <= int(used.max()) < num_samples


class TestClustered:
    def test_the_setting_of_the_paper(self) -> None:
        labels = labels_of(*[900] * 10)
        split = partition("clustered", labels, 20, 0, samples_per_client=200)
        assert split.num_clients == 20
        assert split.sizes.tolist() == [200] * 20
        assert split.groups == [client // 4 for client in range(20)]
        assert_disjoint(split, len(labels))
        group_labels = []
        for client, indices in enumerate(split.clients):
            first, second = labels[indices[:100]], labels[indices[100:]]
            assert first.unique().numel() == second.unique().numel() == 1
            assert first[0] != second[0]
            if client % 4 == 0:
                group_labels.append((int(first[0]), int(second[0])))
            else:  # the same labels in the same order as the rest of the group
                assert group_labels[-1] == (int(first[0]), int(second[0]))
        assert sorted(label for pair in group_labels for label in pair) == list(range(10))

    @given(
        num_groups=st.integers(1, 4),
        group_size=st.integers(1, 4),
        labels_per_group=st.integers(1, 3),
        per_label=st.integers(1, 5),
        spare=st.integers(0, 3),
        seed=st.integers(0, 2**32),
    )
    def test_always_disjoint_and_equal(
        self,
        num_groups: int,
        group_size: int,
        labels_per_group: int,
        per_label: int,
        spare: int,
        seed: int,
    ) -> None:
        labels = labels_of(*[group_size * per_label + spare] * (num_groups * labels_per_group))
        split = partition(
            "clustered",
            labels,
            num_groups * group_size,
            seed,
            num_groups=num_groups,
            samples_per_client=per_label * labels_per_group,
        )
        assert_disjoint(split, len(labels))
        assert split.groups is not None
        owner: dict[int, int] = {}  # label -> group
        for group, indices in zip(split.groups, split.clients, strict=True):
            found, counts = labels[indices].unique(return_counts=True)
            assert counts.tolist() == [per_label] * labels_per_group
            assert all(owner.setdefault(label, group) == group for label in found.tolist())

    def test_train_fraction_keeps_the_first_part_as_released(self) -> None:
        labels = labels_of(*[4000] * 10)
        full = partition("clustered", labels, 20, 0, samples_per_client=1000)
        cut = partition("clustered", labels, 20, 0, samples_per_client=1000, train_fraction=0.8)
        assert cut.groups == full.groups
        for whole, part in zip(full.clients, cut.clients, strict=True):
            assert torch.equal(part, whole[:800])
            assert labels[part].bincount().sort().values[-2:].tolist() == [300, 500]

    def test_too_few_samples(self) -> None:
        labels = labels_of(*[399] + [400] * 9)
        with pytest.raises(
            ValueError,
            match="label 0 has 399 samples, but 4 clients need 100 each; at most 198 would fit",
        ):
            partition("clustered", labels, 20, 0, samples_per_client=200)
        partition("clustered", labels, 20, 0, samples_per_client=198)

    def test_what_does_not_divide(self) -> None:
        labels = labels_of(*[100] * 10)
        with pytest.raises(ValueError, match="num_groups: expected a divisor of num_clients = 21"):
            partition("clustered", labels, 21, 0)
        with pytest.raises(ValueError, match="divisor of the number of labels, 10, got 4"):
            partition("clustered", labels, 20, 0, num_groups=4)
        with pytest.raises(ValueError, match=r"samples_per_client: .* multiple of the 2 labels"):
            partition("clustered", labels, 20, 0, samples_per_client=15)
        with pytest.raises(ValueError, match="num_groups"):
            partition("clustered", labels, 20, 0, num_groups=0)


class TestShards:
    def test_the_setting_of_the_paper(self) -> None:
        labels = labels_of(*[5000] * 10)
        split = partition("shards", labels, 20, 0, num_shards=200, shard_size=250)
        assert split.sizes.tolist() == [500] * 20
        assert split.groups is None
        assert_disjoint(split, len(labels))
        for indices in split.clients:
            for shard in indices.reshape(2, 250):
                assert labels[shard].unique().numel() == 1  # 5000 is a multiple of 250

    @given(
        counts=st.lists(st.integers(1, 30), min_size=1, max_size=5),
        num_clients=st.integers(1, 4),
        shards_per_client=st.integers(1, 3),
        spare=st.integers(0, 3),
        seed=st.integers(0, 2**32),
    )
    def test_disjoint_runs_of_the_sorted_samples(
        self, counts: list[int], num_clients: int, shards_per_client: int, spare: int, seed: int
    ) -> None:
        labels = labels_of(*counts)
        num_shards = num_clients * shards_per_client + spare
        options = {"num_shards": num_shards, "shards_per_client": shards_per_client}
        if num_shards > len(labels):
            with pytest.raises(ValueError, match="shard_size"):
                partition("shards", labels, num_clients, seed, **options)
            return
        split = partition("shards", labels, num_clients, seed, **options)
        assert_disjoint(split, len(labels))
        position = torch.empty(len(labels), dtype=torch.int64)
        position[torch.argsort(labels, stable=True)] = torch.arange(len(labels))
        for indices in split.clients:
            for shard in indices.reshape(shards_per_client, -1):
                start = int(position[shard[0]])
                assert start % len(shard) == 0
                assert position[shard].tolist() == list(range(start, start + len(shard)))

    def test_too_few_shards_or_samples(self) -> None:
        labels = labels_of(*[100] * 10)
        with pytest.raises(ValueError, match="20 clients with 3 shards each need 60 shards"):
            partition("shards", labels, 20, 0, num_shards=50, shards_per_client=3)
        with pytest.raises(
            ValueError,
            match="50 shards of 21 do not fit: there are 1000 samples, enough for shards of 20",
        ):
            partition("shards", labels, 20, 0, num_shards=50, shard_size=21)
        with pytest.raises(ValueError, match="expected positive numbers, got 50 and 0"):
            partition("shards", labels, 20, 0, num_shards=50, shards_per_client=0)

    @pytest.mark.parametrize(
        ("heterogeneity", "shard_size", "most_labels"),
        [("low", 100, 5), ("medium", 250, 2), ("high", 500, 1)],
    )
    def test_heterogeneity_of_figure_5(
        self, heterogeneity: str, shard_size: int, most_labels: int
    ) -> None:
        labels = labels_of(*[5000] * 10)
        split = partition("shards", labels, 20, 0, heterogeneity=heterogeneity)
        assert split.sizes.tolist() == [500] * 20
        assert_disjoint(split, len(labels))
        held = [labels[indices].unique().numel() for indices in split.clients]
        assert max(held) == most_labels
        for indices in split.clients:
            for shard in indices.split(shard_size):
                assert labels[shard].unique().numel() == 1
        if heterogeneity == "medium":  # also the default
            same = partition("shards", labels, 20, 0)
            assert torch.equal(torch.stack(list(same.clients)), torch.stack(list(split.clients)))

    def test_bad_heterogeneity(self) -> None:
        labels = labels_of(*[100] * 10)
        with pytest.raises(ValueError, match="expected one of low, medium, high, got 'extreme'"):
            partition("shards", labels, 20, 0, heterogeneity="extreme")
        with pytest.raises(ValueError, match="heterogeneity: sets num_shards and"):
            partition("shards", labels, 20, 0, heterogeneity="low", num_shards=500)


class TestLabelLimited:
    @pytest.mark.parametrize(
        ("classes", "per_label", "size"),
        [
            (2, 6000, 1000),  # Fashion-MNIST
            (2, 5000, 833),  # CIFAR-10: 60 shards of 833, 20 samples left over
            (5, 5000, 333),
            (8, 5000, 208),
            (10, 5000, 166),
        ],
    )
    def test_the_settings_of_the_paper(self, classes: int, per_label: int, size: int) -> None:
        labels = labels_of(*[per_label] * 10)
        split = partition("label-limited", labels, 30, 0, classes_per_client=classes)
        assert split.sizes.tolist() == [classes * size] * 30
        assert_disjoint(split, len(labels))
        for indices in split.clients:
            shards = labels[indices].reshape(classes, size)
            assert bool((shards == shards[:, :1]).all())  # no shard straddles labels
            assert shards[:, 0].unique().numel() == classes

    @given(
        num_classes=st.integers(1, 6),
        hand=st.integers(1, 6),
        groups=st.integers(1, 4),
        distinct=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def test_always_deals_every_label_equally_often(
        self, num_classes: int, hand: int, groups: int, distinct: bool, seed: int
    ) -> None:
        hand = min(hand, num_classes)
        num_clients = groups * num_classes
        labels = labels_of(*[3 * groups * hand + 1] * num_classes)
        options = {"classes_per_client": hand, "distinct": distinct, "shard_size": 3}
        split = partition("label-limited", labels, num_clients, seed, **options)
        assert_disjoint(split, len(labels))
        counts = split.label_counts(labels, num_classes)
        assert counts.sum(dim=0).tolist() == [3 * groups * hand] * num_classes
        assert split.sizes.tolist() == [3 * hand] * num_clients
        if distinct:
            assert counts.max() == 3

    @pytest.mark.slow
    def test_pairs_of_labels(self) -> None:
        # With 60 shards, a client's second one has the first one's label with probability 5 / 59;
        # if labels must differ, every other label is as likely (by symmetry).
        labels = labels_of(*[12] * 10)
        seeds = 200
        second: list[int] = []
        for seed in range(seeds):
            split = partition("label-limited", labels, 30, seed, distinct=False)
            second += [int(labels[i[0]] == labels[i[2]]) for i in split.clients]
            pairs = partition("label-limited", labels, 30, seed)
            assert all(labels[i[0]] != labels[i[2]] for i in pairs.clients)
        rate = 5 / 59
        # 5 standard errors; the clients of one seed are weakly dependent, hence the 1.2.
        bound = 1.2 * 5 * (30 * seeds * rate * (1 - rate)) ** 0.5
        assert abs(sum(second) - 30 * seeds * rate) < bound

    def test_bad_options(self) -> None:
        labels = labels_of(*[100] * 9, 50)
        with pytest.raises(ValueError, match=r"classes_per_client: expected 1 to 10, .* got 11"):
            partition("label-limited", labels, 30, 0, classes_per_client=11)
        with pytest.raises(ValueError, match="need 14 shards, no multiple of the 10 labels"):
            partition("label-limited", labels, 7, 0)
        with pytest.raises(
            ValueError, match="label 9 has 50 samples, enough for 6 shards of 8, not of 9"
        ):
            partition("label-limited", labels, 30, 0, shard_size=9)
        assert partition("label-limited", labels, 30, 0).sizes.tolist() == [16] * 30

    @given(
        num_classes=st.integers(1, 6),
        hand=st.integers(1, 3),
        groups=st.integers(1, 4),
        size=st.integers(1, 4),
        seed=st.integers(0, 2**32),
    )
    def test_ranges_hold_the_shards_that_clients_were_dealt(
        self, num_classes: int, hand: int, groups: int, size: int, seed: int
    ) -> None:
        """Written out with one list of shards per label and one tensor per client."""
        hand = min(hand, num_classes)
        num_clients = groups * num_classes
        labels = labels_of(*[size * groups * hand + 2] * num_classes)
        given = {"classes_per_client": hand, "shard_size": size}
        split = partition("label-limited", labels, num_clients, seed, **given)
        rng = generator(seed, "partition")
        samples = [shuffled(torch.nonzero(labels == c).flatten(), rng) for c in range(num_classes)]
        hands = _deal_distinct(num_classes, num_clients, hand, rng)
        piles = [list(part.split(size)[: groups * hand]) for part in samples]
        for client, hand_of_client in enumerate(hands):
            dealt = torch.cat([piles[c].pop() for c in hand_of_client])
            assert torch.equal(split.clients[client], dealt)


class TestSharedShards:
    def split(self, seed: int = 0, clients: int = 400) -> tuple[torch.Tensor, Partition]:
        labels = labels_of(*[50] * 10)
        return labels, partition("label-limited", labels, clients, seed, shared=True, shard_size=20)

    def test_every_client_draws_distinct_labels_and_samples(self) -> None:
        labels, split = self.split()
        assert isinstance(split.clients, Drawn)
        assert split.sizes.tolist() == [40] * 400
        counts = split.label_counts(labels, 10)
        assert torch.equal(counts.sort(dim=1).values[:, -3:], torch.tensor([[0, 20, 20]] * 400))
        for indices in split.clients:
            assert len(indices.unique()) == 40
        # Each label is drawn with probability 1/5: 5 standard deviations of a binomial.
        drawn = (counts > 0).sum(dim=0)
        assert (drawn - 80).abs().max() < 5 * (400 * 0.2 * 0.8) ** 0.5

    def test_a_client_depends_on_the_seed_and_its_id_alone(self) -> None:
        _, many = self.split()
        _, few = self.split(clients=7)
        _, other = self.split(seed=1, clients=7)
        for client in (6, 0, 6):
            assert torch.equal(many.clients[client], few.clients[client])
            assert not torch.equal(other.clients[client], few.clients[client])

    def test_a_part_is_kept_from_the_first_sample_on(self) -> None:
        labels, whole = self.split(clients=7)
        given = {"shared": True, "shard_size": 20, "train_fraction": 0.3}
        part = partition("label-limited", labels, 7, 0, **given)
        assert part.sizes.tolist() == [12] * 7
        for one, all_ in zip(part.clients, whole.clients, strict=True):
            assert torch.equal(one, all_[:12])

    def test_bad_options(self) -> None:
        labels = labels_of(*[50] * 9, 30)
        for size, got in ((None, "None"), (31, "31"), (0, "0")):
            with pytest.raises(ValueError, match=rf"shard_size: expected 1 to 30 .* got {got}"):
                partition("label-limited", labels, 7, 0, shared=True, shard_size=size)
        with pytest.raises(ValueError, match="distinct: expected true with shared = true"):
            partition("label-limited", labels, 7, 0, shared=True, shard_size=5, distinct=False)


class TestIndexSets:
    SETS: tuple[list[int], ...] = ([3, 1], [], [4, 1, 5], [9])

    @pytest.mark.parametrize("form", ["ranges", "drawn"])
    def test_are_sequences(self, form: str) -> None:
        given = [torch.tensor(ids, dtype=torch.int64) for ids in self.SETS]
        sizes = torch.tensor([len(ids) for ids in given])
        sets: IndexSets = Ranges.listed(given)
        if form == "drawn":
            sets = Drawn(lambda client: given[client], sizes)
        assert [ids.tolist() for ids in sets] == list(self.SETS)
        assert len(sets) == 4 and sets[-1].tolist() == [9]
        assert sets.joined().tolist() == [3, 1, 4, 1, 5, 9]
        first = sets.first(torch.tensor([1, 0, 2, 1]))
        assert [ids.tolist() for ids in first] == [[3], [], [4, 1], [9]]
        assert first.joined().tolist() == [3, 4, 1, 9]
        for client in (4, -5):
            with pytest.raises(
                IndexError, match=rf"client: expected an id in \[0, 4\), got {client}"
            ):
                sets[client]

    def test_ranges_are_views_of_one_list(self) -> None:
        order = torch.arange(10)
        sets = Ranges(order, torch.tensor([6, 0]), torch.tensor([3, 2]))
        assert [ids.tolist() for ids in sets] == [[6, 7, 8], [0, 1]]
        assert sets.joined().tolist() == [6, 7, 8, 0, 1]
        assert sets[1].data_ptr() == order.data_ptr()

    def test_sizes_are_counted_when_they_are_needed(self) -> None:
        calls = []

        def count() -> torch.Tensor:
            calls.append(0)
            return torch.tensor([5, 2, 10])

        sets = Counted(3, count, 0.7)
        assert len(sets) == 3 and not calls
        assert sets.sizes.tolist() == [3, 1, 7]  # 0.7 * 10 is 7 in spite of rounding
        assert [ids.tolist() for ids in sets] == [[0, 1, 2], [5], [7, 8, 9, 10, 11, 12, 13]]
        assert [ids.tolist() for ids in sets.first(torch.tensor([1, 0, 2]))] == [[0], [], [7, 8]]


class TestDirichlet:
    def test_balanced(self) -> None:
        labels = labels_of(*[5000] * 10)
        split = partition("dirichlet", labels, 100, 0, alpha=0.1)
        assert split.sizes.tolist() == [500] * 100
        assert_disjoint(split, len(labels))
        # All 50,000 samples are used, although the clients' drawn proportions differ.
        assert split.label_counts(labels, 10).sum(dim=0).tolist() == [5000] * 10

    @pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
    def test_moments_of_the_proportions(self, alpha: float) -> None:
        # A proportion has the mean 1/C and the variance (1/C)(1 - 1/C) / (C alpha + 1), and the
        # share of n samples adds the variance of the multinomial.
        clients, samples = 400, 200
        labels = labels_of(*[clients * samples] * 5)  # no label runs out
        split = partition("dirichlet", labels, clients, 0, alpha=alpha, samples_per_client=samples)
        shares = split.label_counts(labels, 5).double() / samples
        spread = 0.2 * 0.8 / (5 * alpha + 1)
        variance = spread + (0.2 * 0.8 - spread) / samples
        assert (shares.mean(dim=0) - 0.2).abs().max() < 5 * (variance / clients) ** 0.5
        # The fourth central moment of a number in [0, 1] is at most its variance: an error bound
        # for the estimated variance that holds for any shape.
        assert (shares.var(dim=0) - variance).abs().max() < 5 * (variance / clients) ** 0.5

    def test_unbalanced(self) -> None:
        labels = labels_of(*[500] * 10)
        split = partition("dirichlet", labels, 20, 0, alpha=0.5, balanced=False)
        assert_disjoint(split, len(labels))
        assert int(split.sizes.sum()) == 5000  # every sample has a client
        assert split.sizes.min() >= 10 and split.sizes.max() > 2 * split.sizes.min()
        counts = split.label_counts(labels, 10)
        # The largest share of a label is far from 1 / 20.
        assert (counts.max(dim=0).values > 75).all()

    def test_tiny_and_huge_alpha(self) -> None:
        labels = labels_of(*[400] * 10)
        few = partition("dirichlet", labels, 10, 0, alpha=1e-6, samples_per_client=100)
        assert (few.label_counts(labels, 10) > 0).sum(dim=1).tolist() == [1] * 10
        many = partition("dirichlet", labels, 10, 0, alpha=1e6, balanced=False)
        assert (many.label_counts(labels, 10) - 40).abs().max() <= 1

    @pytest.mark.parametrize("balanced", [True, False])
    def test_redraw_keeps_the_proportions(self, balanced: bool) -> None:
        labels = labels_of(*[4000] * 10)
        options = {"alpha": 0.3, "balanced": balanced}
        if balanced:
            options["samples_per_client"] = 400
        first, again = (
            partition("dirichlet", labels, 10, 0, **options, redraw=draw) for draw in (0, 1)
        )
        counts, others = (split.label_counts(labels, 10) for split in (first, again))
        if balanced:  # 400 multinomial draws from the same proportions: deviation at most 10 each
            assert (counts - others).abs().max() < 5 * 2**0.5 * 10
        else:
            assert torch.equal(counts, others)
        for one, two in zip(first.clients, again.clients, strict=True):
            assert len(set(one.tolist()) & set(two.tolist())) < 0.8 * len(one)

    def test_bad_options(self) -> None:
        labels = labels_of(*[100] * 10)
        for alpha in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="alpha: expected a positive number"):
                partition("dirichlet", labels, 20, 0, alpha=alpha)
        with pytest.raises(ValueError, match=r"samples_per_client: expected 1 to 50 .* got 51"):
            partition("dirichlet", labels, 20, 0, samples_per_client=51)
        with pytest.raises(ValueError, match="samples_per_client: only for balanced = true"):
            partition("dirichlet", labels, 20, 0, samples_per_client=5, balanced=False)
        with pytest.raises(ValueError, match="min_samples: 1000 draws with"):
            partition("dirichlet", labels, 50, 0, alpha=0.01, balanced=False)
        with pytest.raises(ValueError, match="redraw, min_samples: expected 0 or more"):
            partition("dirichlet", labels, 20, 0, redraw=-1)


class TestNatural:
    def test_passes_the_clients_on(self) -> None:
        clients = [torch.arange(3), torch.arange(3, 10)]
        split = partition("natural", torch.zeros(10, dtype=torch.int64), 2, 0, clients=clients)
        assert [indices.tolist() for indices in split.clients] == [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9]]
        assert split.sizes.tolist() == [3, 7]

    def test_bad_clients(self) -> None:
        labels = torch.zeros(10, dtype=torch.int64)
        with pytest.raises(
            ValueError, match="expected 1, the number of clients of the data set, got 2"
        ):
            partition("natural", labels, 2, 0, clients=[torch.arange(3)])
        with pytest.raises(ValueError, match="needs a data set that is divided among clients"):
            partition("natural", labels, 2, 0)
        with pytest.raises(
            ValueError, match=r"clients\[0\]: expected indices in \[0, 10\), got 8 to"
        ):
            partition("natural", labels, 1, 0, clients=[torch.arange(8, 12)])


@pytest.mark.parametrize("name", [name for name in PARTITIONS if name != "natural"])
def test_depends_on_the_seed_alone(name: str) -> None:
    labels = labels_of(*[500] * 10)
    first = partition(name, labels, 20, 3).clients.joined()
    state = torch.random.get_rng_state()
    assert torch.equal(partition(name, labels, 20, 3).clients.joined(), first)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(partition(name, labels, 20, 4).clients.joined(), first)


def test_label_counts() -> None:
    labels = torch.tensor([0, 2, 2, 1, 0])
    split = Partition(Ranges.listed([torch.tensor([0, 1, 2]), torch.tensor([3])]))
    assert split.label_counts(labels, 4).tolist() == [[1, 0, 2, 0], [0, 1, 0, 0]]


def test_bad_arguments() -> None:
    labels = labels_of(*[500] * 10)
    with pytest.raises(ValueError, match="unknown partition 'iid'; there are: clustered, "):
        partition("iid", labels, 20, 0)
    with pytest.raises(
        TypeError, match=r"'clustered': .*'bogus'; options: num_groups, samples_per"
    ):
        partition("clustered", labels, 20, 0, bogus=1)
    with pytest.raises(ValueError, match=r"labels: expected int64 \[n\], got torch.float32"):
        partition("clustered", labels.float(), 20, 0)
    with pytest.raises(ValueError, match="num_clients: expected a positive number, got 0"):
        partition("shards", labels, 0, 0)
    for fraction in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"train_fraction: expected a number in \(0, 1\]"):
            partition("shards", labels, 20, 0, train_fraction=fraction)
    with pytest.raises(ValueError, match=r"train_fraction: 0\.5 leaves clients .* no sample"):
        partition("shards", labels, 20, 0, shard_size=1, shards_per_client=1, train_fraction=0.5)
