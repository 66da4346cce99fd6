# SPDX-License-Identifier: Apache-2.0
"""Data sets from `load`: shipped, generated and, where they are cached, real ones."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fastagg_sim.data import (
    DATASETS,
    CorruptDataError,
    DataNotFoundError,
    Dataset,
    DatasetInfo,
    GeneratedDataset,
    cache_path,
    digits,
    load,
    load_images,
)
from fastagg_sim.data.cache import write_cache
from fastagg_sim.data.images import CIFAR10, IMAGE_SETS, RawImages
from fastagg_sim.partition import partition
from fastagg_sim.seeds import numpy_generator


def assert_well_formed(dataset: Dataset) -> None:
    for x, y in ((dataset.train_x, dataset.train_y), (dataset.test_x, dataset.test_y)):
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        assert tuple(x.shape[1:]) == dataset.in_shape == DATASETS[dataset.name].in_shape
        assert x.isfinite().all()
        assert y.dtype == torch.int64
        assert y.shape == (len(x),)
        assert 0 <= int(y.min()) <= int(y.max()) < dataset.num_classes


class TestDigits:
    def test_contents(self) -> None:
        digits = load("digits")
        assert_well_formed(digits)
        assert (len(digits.train_y), len(digits.test_y)) == (1442, 355)
        assert digits.in_shape == (1, 8, 8)
        assert digits.clients is None
        assert (float(digits.train_x.min()), float(digits.train_x.max())) == (0.0, 1.0)

    def test_split_is_stratified_disjoint_and_fixed(self) -> None:
        digits = load("digits", seed=0)
        test = digits.test_y.bincount()
        everything = test + digits.train_y.bincount()
        assert torch.equal(test, everything // 5)
        again = load("digits", seed=1)
        assert torch.equal(again.test_x, digits.test_x)
        assert torch.equal(again.train_y, digits.train_y)
        # The 1,797 images are distinct, so the test detects a shared one.
        images = torch.cat([digits.train_x, digits.test_x]).flatten(1)
        assert len(torch.unique(images, dim=0)) == 1797

    def test_holds_the_clustered_setting(self) -> None:
        split = partition("clustered", load("digits").train_y, 20, 0, samples_per_client=60)
        assert split.sizes.tolist() == [60] * 20


class TestSynthetic:
    def test_contents(self) -> None:
        synthetic = load("synthetic", num_clients=30)
        assert_well_formed(synthetic)
        assert synthetic.in_shape == (60,)
        assert synthetic.num_classes == 10
        assert synthetic.clients is not None
        assert len(synthetic.clients) == 30
        used = torch.cat(synthetic.clients)
        assert torch.equal(used, torch.arange(len(synthetic.train_y)))
        assert min(len(indices) for indices in synthetic.clients) >= 45  # 90 % of at least 50

    def test_depends_on_the_seed_alone(self) -> None:
        first = load("synthetic", seed=3, num_clients=5)
        torch.rand(3)
        np.random.rand(3)
        again = load("synthetic", seed=3, num_clients=5)
        assert torch.equal(again.train_x, first.train_x)
        assert torch.equal(again.test_y, first.test_y)
        other = load("synthetic", seed=4, num_clients=5)
        assert len(other.train_y) != len(first.train_y)

    def test_more_clients_leave_the_first_as_they_were(self) -> None:
        few, many = load("synthetic", num_clients=3), load("synthetic", num_clients=8)
        size = len(few.train_y)
        assert torch.equal(many.train_x[:size], few.train_x)
        assert torch.equal(many.train_y[:size], few.train_y)

    def test_distribution(self) -> None:
        synthetic = load("synthetic", num_clients=400)
        assert synthetic.clients is not None
        sizes = torch.tensor([len(indices) for indices in synthetic.clients]).double() / 0.9
        # log(n - 50) ~ N(4, 2^2): mean and deviation to 5 standard errors; sizes below 55 lose too
        # much to rounding, so the quantiles are compared: P(n > 50 + e^4) = 1/2, and so on.
        for z in (-0.5, 0.0, 0.5, 1.0, 2.0):
            share = (sizes > 50 + np.exp(4 + 2 * z)).double().mean()
            right = 0.5 * (1 - torch.erf(torch.tensor(z / 2**0.5)))
            error = 5 * (right * (1 - right) / 400).sqrt()
            assert abs(share - right) < error
        x = [synthetic.train_x[i].double() for i in synthetic.clients if len(i) > 500]
        within = torch.cat([part - part.mean(dim=0) for part in x]).var(dim=0)
        expected = torch.arange(1, 61, dtype=torch.float64) ** -1.2
        # More than 10,000 samples: 5 relative standard errors of a variance are under 0.08.
        assert sum(map(len, x)) > 10_000
        assert ((within / expected) - 1).abs().max() < 0.08
        centers = torch.stack([part.mean() for part in x])
        assert centers.std() > 0.5  # B_k ~ N(0, 1): the clients' inputs are far apart

    def test_redraw_keeps_the_clients_and_changes_their_samples(self) -> None:
        first, again = (load("synthetic", num_clients=8, redraw=draw) for draw in (0, 1))
        assert first.clients is not None and again.clients is not None
        assert [len(ids) for ids in first.clients] == [len(ids) for ids in again.clients]
        assert not torch.equal(first.train_x, again.train_x)
        for ids in first.clients:
            means = [part.train_x[ids].double().mean(dim=0) for part in (first, again)]
            # The same v_k: each of 60 means has the deviation j^-0.6 / sqrt(n), twice.
            spread = torch.arange(1, 61, dtype=torch.float64) ** -0.6 * (2 / len(ids)) ** 0.5
            assert ((means[0] - means[1]) / spread).abs().max() < 5.5

    def test_clients_are_those_of_one_generator_after_the_other(self) -> None:
        """Written out: every client's numbers in the order of the definition."""
        synthetic = load("synthetic", seed=5, num_clients=4)
        train, test = [], []
        for client in range(4):
            rng = numpy_generator(5, "data", "synthetic", client)
            size = int(rng.lognormal(4.0, 2.0)) + 50
            u, center = rng.normal(0.0, 1.0), rng.normal(0.0, 1.0)
            mean, weight = rng.normal(center, 1.0, 60), rng.normal(u, 1.0, (10, 60))
            bias = rng.normal(u, 1.0, 10)
            x = mean + np.arange(1, 61) ** -0.6 * rng.normal(size=(size, 60))
            y = np.argmax(x @ weight.T + bias, axis=1)
            train.append((x[: int(0.9 * size)], y[: int(0.9 * size)]))
            test.append((x[int(0.9 * size) :], y[int(0.9 * size) :]))
        for parts, found_x, found_y in (
            (train, synthetic.train_x, synthetic.train_y),
            (test, synthetic.test_x, synthetic.test_y),
        ):
            right = np.concatenate([x for x, _ in parts]).astype(np.float32)
            assert torch.equal(found_x, torch.from_numpy(right))
            assert torch.equal(found_y, torch.from_numpy(np.concatenate([y for _, y in parts])))

    def test_clients_of_a_group_share_a_distribution(self) -> None:
        synthetic = load("synthetic", num_clients=12, groups=5, samples=2000)
        assert isinstance(synthetic, GeneratedDataset)
        assert synthetic.groups == [k % 5 for k in range(12)]
        assert synthetic.sizes.tolist() == [1800] * 12
        assert len(synthetic.test_y) == 12 * 200
        parts = [synthetic.client(k) for k in range(12)]
        means = torch.stack([x.double().mean(dim=0) for x, _ in parts])
        shares = torch.stack([torch.bincount(y, minlength=10) / len(y) for _, y in parts])
        spread = torch.arange(1, 61, dtype=torch.float64) ** -0.6 * (2 / 1800) ** 0.5
        for one, other in ((0, 5), (0, 10), (1, 6), (1, 11), (4, 9)):  # of a group
            assert not torch.equal(parts[one][0], parts[other][0])
            # 60 differences of means, each of them with this deviation
            assert ((means[one] - means[other]) / spread).abs().max() < 5.5
            # shares of 1800 samples have deviations of at most 0.012
            assert (shares[one] - shares[other]).abs().max() < 0.09
        assert (means[0] - means[1]).abs().max() > 1.0  # v ~ N(B, 1), B ~ N(0, 1)

    def test_test_data_are_those_of_the_first_clients(self) -> None:
        every = load("synthetic", num_clients=6)
        few = load("synthetic", num_clients=6, test_clients=2)
        assert torch.equal(few.train_x, every.train_x)
        assert torch.equal(few.test_x, load("synthetic", num_clients=2).test_x)
        assert torch.equal(few.test_y, every.test_y[: len(few.test_y)])

    def test_bad_options(self) -> None:
        for option, value, message in (
            ("groups", 0, "groups: expected 1 to num_clients = 7, got 0"),
            ("groups", 8, "groups: expected 1 to num_clients = 7, got 8"),
            ("samples", 9, "samples: expected at least 10, got 9"),
            ("test_clients", 0, "test_clients: expected a positive number, got 0"),
        ):
            with pytest.raises(ValueError, match=message):
                load("synthetic", num_clients=7, **{option: value})
        with pytest.raises(ValueError, match="redraw: expected 0 or more, got -1"):
            load("synthetic", redraw=-1)
        with pytest.raises(ValueError, match="num_clients: expected a positive number, got 0"):
            load("synthetic", num_clients=0)
        with pytest.raises(ValueError, match="alpha, beta: expected standard deviations"):
            load("synthetic", beta=-1.0)
        with pytest.raises(TypeError, match=r"'synthetic': .*; options: num_clients, alpha, beta"):
            load("synthetic", normalize="unit")


class TestImages:
    @pytest.fixture
    def tiny(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RawImages:
        """A cached CIFAR-10 of 5 + 2 images; loads by its name from `tmp_path`."""
        rng = np.random.RandomState(0)
        x = rng.randint(0, 256, (7, 3, 32, 32), np.uint8)
        y = np.arange(7, dtype=np.uint8)
        raw = RawImages(x[:5], y[:5], x[5:], y[5:])
        images = replace(CIFAR10, sizes=(5, 2), sha256=raw.sha256())
        write_cache(images, raw, tmp_path)
        info = DatasetInfo("tiny", images.shape, partial(load_images, images), images)
        monkeypatch.setitem(DATASETS, "cifar10", info)
        monkeypatch.setenv("FASTAGG_DATA", str(tmp_path))
        return raw

    def test_normalisations(self, tiny: RawImages) -> None:
        exact = torch.from_numpy(tiny.train_x).double() / 255
        mean = torch.tensor(CIFAR10.mean, dtype=torch.float64).view(3, 1, 1)
        std = torch.tensor(CIFAR10.std, dtype=torch.float64).view(3, 1, 1)
        for normalize, expected in (
            ("unit", exact),
            ("half", (exact - 0.5) / 0.5),
            ("standard", (exact - mean) / std),
        ):
            cifar10 = load("cifar10", normalize=normalize)
            assert_well_formed(cifar10)
            # Three float32 operations on values below 3.
            torch.testing.assert_close(cifar10.train_x.double(), expected, rtol=0, atol=1e-6)
            assert cifar10.train_y.tolist() == list(range(5))
            assert cifar10.test_y.tolist() == [5, 6]

    def test_the_default_is_that_of_the_data_set(self, tiny: RawImages) -> None:
        assert torch.equal(load("cifar10").test_x, load("cifar10", normalize="half").test_x)
        assert {name: images.normalize for name, images in IMAGE_SETS.items()} == {
            "mnist": "standard",
            "fmnist": "unit",
            "cifar10": "half",
        }

    def test_bad_options(self, tiny: RawImages) -> None:
        with pytest.raises(ValueError, match="normalize: expected one of unit, half, standard"):
            load("cifar10", normalize="imagenet")
        with pytest.raises(TypeError, match=r"'cifar10': .*'scale'; options: normalize"):
            load("cifar10", scale=2)

    def test_a_missing_data_set_names_the_remedy(self, tmp_path: Path) -> None:
        with pytest.raises(DataNotFoundError) as caught:
            load("mnist", root=tmp_path)
        message = str(caught.value)
        assert str(tmp_path / "mnist.safetensors") in message
        assert "fastagg-sim data mnist --from FOLDER" in message
        assert "FASTAGG_DATA" in message

    def test_a_damaged_data_set_names_the_remedy(self, tiny: RawImages, tmp_path: Path) -> None:
        path = tmp_path / "cifar10.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CorruptDataError, match=r"is damaged(.|\n)*fastagg-sim data cifar10"):
            load("cifar10")


def test_unknown_data_set() -> None:
    with pytest.raises(
        ValueError, match="unknown data set 'imagenet'; there are: cifar10, digits, "
    ):
        load("imagenet")


KNOWN = {  # first labels of both parts, well known; smallest and largest training class
    "mnist": ([5, 0, 4, 1, 9, 2, 1, 3, 1, 4], [7, 2, 1, 0, 4, 1, 4, 9, 5, 9], (5421, 6742)),
    "fmnist": ([9, 0, 0, 3, 0, 2, 7, 2, 5, 5], [9, 2, 1, 1, 6, 1, 4, 6, 5, 7], (6000, 6000)),
    "cifar10": ([6, 9, 9, 4, 1, 1, 2, 7, 8, 3], [3, 8, 8, 0, 6, 6, 1, 6, 3, 1], (5000, 5000)),
}


@pytest.fixture
def real(request: pytest.FixtureRequest) -> Dataset:
    """The real data set named by the parameter, standardised; skips where it is not cached."""
    path = cache_path(IMAGE_SETS[request.param])
    if not path.is_file():
        pytest.skip(
            f"{request.param} is not cached: no {path}; get it: fastagg-sim data {request.param}"
        )
    return load(request.param, normalize="standard")


@pytest.mark.realdata
@pytest.mark.parametrize("real", list(IMAGE_SETS), indirect=True)
def test_real_data(real: Dataset) -> None:
    assert_well_formed(real)
    train, test, (fewest, most) = KNOWN[real.name]
    assert (len(real.train_y), len(real.test_y)) == IMAGE_SETS[real.name].sizes
    assert real.train_y[:10].tolist() == train
    assert real.test_y[:10].tolist() == test
    counts = real.train_y.bincount()
    assert (int(counts.min()), int(counts.max())) == (fewest, most)
    # The constants have four digits: mean and deviation are off by less than 5e-4.
    std, mean = torch.std_mean(real.train_x, dim=(0, 2, 3))
    assert mean.abs().max() < 5e-4
    assert (std - 1).abs().max() < 5e-4


@pytest.mark.realdata
@pytest.mark.parametrize("real", ["cifar10"], indirect=True)
def test_first_pixels_of_cifar10(real: Dataset) -> None:
    raw = load("cifar10", normalize="unit")
    # Red, green and blue of the first two pixels of the first training image, a frog.
    assert (raw.train_x[0, :, 0, :2] * 255).round().T.tolist() == [[59, 62, 63], [43, 46, 45]]


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("real", "num_clients", "samples"),
    [("mnist", 20, 200), ("mnist", 40, 200), ("cifar10", 20, 1000), ("cifar10", 40, 500)],
    indirect=["real"],
)
def test_the_settings_of_paper_000_fit(real: Dataset, num_clients: int, samples: int) -> None:
    split = partition("clustered", real.train_y, num_clients, 0, samples_per_client=samples)
    assert split.sizes.tolist() == [samples] * num_clients
    assert split.groups is not None
    for indices in split.clients:
        counts = real.train_y[indices].bincount(minlength=10)
        assert sorted(counts.tolist())[-3:] == [0, samples // 2, samples // 2]


def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of scikit-learn is read without importing it; where it is missing, by its reader."""
    code = (
        "import sys; from fastagg_sim.data.digits import load_digits;"
        "load_digits(None, 0); print('sklearn' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    read = digits.load_digits(None, 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    theirs = digits.load_digits(None, 0)
    assert read.train_x.shape == (1442, 1, 8, 8) and torch.equal(read.train_x, theirs.train_x)
    assert torch.equal(read.train_y, theirs.train_y)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataNotFoundError, match="pip install scikit-learn"):
        digits.load_digits(None, 0)
