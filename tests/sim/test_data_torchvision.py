# SPDX-License-Identifier: Apache-2.0
"""torchvision as a source: made up, and the real one where it is installed for this torch."""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fastagg_sim.data import DataNotFoundError, download
from fastagg_sim.data.cache import read_cache
from fastagg_sim.data.idx import parse_idx
from fastagg_sim.data.images import CIFAR10, IMAGE_SETS, RawImages
from tests.sim.made_data import Tiny, idx, python2_batch

RNG = np.random.RandomState(0)

MADE_UP = """
import numpy
class Tensor:
    def __init__(self, array):
        self.numpy = lambda: array
class MNIST:
    def __init__(self, root, train, download):
        assert download
        start, end = (0, 6) if train else (6, 9)
        images = numpy.frombuffer(bytes.fromhex({pixels!r}), numpy.uint8).reshape(9, 4, 5)
        self.data = Tensor(images[start:end])
        self.targets = Tensor(numpy.arange(start, end))
"""


class TestMadeUp:
    def test_its_arrays_are_used(self, tiny: Tiny) -> None:
        pixels = np.concatenate([tiny.raw.train_x, tiny.raw.test_x])
        tiny.put_torchvision(MADE_UP.format(pixels=pixels.tobytes().hex()))
        path, said = tiny.get()
        assert said == [
            "mnist: trying torchvision",
            f"mnist: from torchvision, checked; in the cache: {path}",
        ]
        assert read_cache(tiny.images, tiny.root).sha256() == tiny.images.sha256
        assert "torchvision" not in sys.modules

    def test_other_images_are_refused(self, tiny: Tiny) -> None:
        tiny.put_torchvision(MADE_UP.format(pixels="00" * 180))
        with pytest.raises(DataNotFoundError, match="torchvision: this is not MNIST"):
            tiny.get()
        assert not tiny.root.exists()

    def test_of_cifar_it_only_downloads_the_archive(self, tiny: Tiny) -> None:
        x = RNG.randint(0, 256, (6, 3, 32, 32), np.uint8)
        y = np.arange(6, dtype=np.uint8)
        batches = np.concatenate([y[:, None], x.reshape(6, 3072)], axis=1)
        names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
        tiny.files = {name: batch.tobytes() for name, batch in zip(names, batches, strict=True)}
        tiny.put_archive(tiny.source / "cifar.tar.gz")
        tiny.put_torchvision(
            "class CIFAR10:\n"
            "    url, filename, tgz_md5 = 'https://there', 'cifar.tar.gz', 'md5'\n"
            "    def __init__(self, *arguments, **options):\n"
            "        raise RuntimeError('it would unpickle')\n",
            "import shutil\n"
            "def download_url(url, root, filename, md5):\n"
            "    assert (url, md5) == ('https://there', 'md5')\n"
            f"    shutil.copy({str(tiny.source / 'cifar.tar.gz')!r}, root / filename)\n",
        )
        raw = RawImages(x[:5], y[:5], x[5:], y[5:])
        images = replace(
            CIFAR10, sizes=(5, 1), sha256=raw.sha256(), published=(), mirrors=(), npm=None
        )
        download.fetch_images(images, root=tiny.root, progress=lambda line: None)
        assert read_cache(images, tiny.root).sha256() == images.sha256

    def test_one_that_does_not_fit_this_torch(self, tiny: Tiny) -> None:
        tiny.put_torchvision("raise RuntimeError('operator torchvision::nms does not exist')")
        with pytest.raises(
            DataNotFoundError,
            match=r"imported with this torch \(RuntimeError: operator .*; install the build of",
        ):
            tiny.get()


def with_torchvision(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@functools.cache
def why_not() -> str:
    """Return why torchvision cannot be imported, or "". In a process of its own, as everywhere."""
    lines = with_torchvision("import torchvision").stderr.splitlines()
    return lines[-1] if lines else ""


@pytest.fixture
def torchvision() -> None:
    if why_not():
        pytest.skip(f"torchvision cannot be imported: {why_not()}")


def idx_files(images: np.ndarray, labels: np.ndarray) -> dict[str, bytes]:
    return {"images-idx3-ubyte": idx(images), "labels-idx1-ubyte": idx(labels)}


@pytest.mark.slow
@pytest.mark.usefixtures("torchvision")
class TestReal:
    @pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
    def test_it_decodes_idx_as_our_parser_does(self, name: str, tmp_path: Path) -> None:
        raw = tmp_path / name / "raw"
        raw.mkdir(parents=True)
        expected = {}
        for part, short, n in (("train", "train", 7), ("t10k", "test", 3)):
            images = RNG.randint(0, 256, (n, 28, 28), np.uint8)
            for kind, content in idx_files(images, np.arange(n, dtype=np.uint8)).items():
                (raw / f"{part}-{kind}").write_bytes(content)
                ndim = 3 if "images" in kind else 1
                expected[f"{short}_{'x' if ndim == 3 else 'y'}"] = parse_idx(content, ndim)
        code = download.TORCHVISION_READER.read_text(encoding="utf-8")
        done = with_torchvision(code, name, str(tmp_path))
        assert done.returncode == 0, done.stderr
        decoded = load_file(tmp_path / "decoded.safetensors")
        assert decoded.keys() == expected.keys()
        for key, array in expected.items():
            assert decoded[key].dtype == np.uint8
            assert np.array_equal(decoded[key], array[:, None] if key.endswith("x") else array)

    def test_it_decodes_cifar_as_our_decoder_does(self, tmp_path: Path) -> None:
        stems = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        x = RNG.randint(0, 256, (12, 3, 32, 32), np.uint8)
        y = RNG.randint(0, 10, 12).astype(np.uint8)
        files = {
            stem: python2_batch(x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2].tolist())
            for i, stem in enumerate(stems)
        }
        with tarfile.open(tmp_path / "cifar.tar.gz", "w:gz") as tar:
            for stem, content in files.items():
                member = tarfile.TarInfo(f"cifar-10-batches-py/{stem}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        folder = tmp_path / "cifar-10-batches-py"
        folder.mkdir()
        meta = pickle.dumps({"label_names": list("0123456789")})
        for stem, content in {**files, "batches.meta": meta}.items():
            (folder / stem).write_bytes(content)
        sums = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in folder.iterdir()}
        done = with_torchvision(
            "import sys, numpy, warnings\n"
            "warnings.simplefilter('ignore')  # numpy.core\n"
            "from torchvision.datasets import CIFAR10\n"
            f"sums = {sums!r}\n"
            "for files in (CIFAR10.train_list, CIFAR10.test_list):\n"
            "    for file in files:\n"
            "        file[1] = sums[file[0]]\n"
            "CIFAR10.meta = {**CIFAR10.meta, 'md5': sums['batches.meta']}\n"
            "for part, train in (('train', True), ('test', False)):\n"
            "    got = CIFAR10(sys.argv[1], train=train)\n"
            "    numpy.save(f'{sys.argv[1]}/{part}_x.npy', got.data)\n"
            "    numpy.save(f'{sys.argv[1]}/{part}_y.npy', got.targets)\n",
            str(tmp_path),
        )
        assert done.returncode == 0, done.stderr
        theirs = {p.stem: np.load(p) for p in tmp_path.glob("*.npy")}
        raw = RawImages(x[:10], y[:10], x[10:], y[10:])
        images = replace(CIFAR10, sizes=(10, 2), sha256=raw.sha256())
        ours = images.read_from(tmp_path / "cifar.tar.gz")
        for part in ("train", "test"):
            their_x = theirs[f"{part}_x"].transpose(0, 3, 1, 2)  # it has the channels last
            assert np.array_equal(ours.arrays()[f"{part}_x"], their_x)
            assert np.array_equal(ours.arrays()[f"{part}_y"], theirs[f"{part}_y"])

    def test_files_that_lie_are_refused(self, tiny: Tiny, tmp_path: Path) -> None:
        raw = tmp_path / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for name, content in tiny.files.items():
            (raw / name).write_bytes(content[:-1])
        code = download.TORCHVISION_READER.read_text(encoding="utf-8")
        done = with_torchvision(code, "MNIST", str(tmp_path))
        assert done.returncode != 0
        assert not (tmp_path / "decoded.safetensors").exists()

    def test_our_sums_are_of_the_files_that_it_lists(self) -> None:
        done = with_torchvision(
            "from torchvision.datasets import MNIST, FashionMNIST\n"
            "print([[name for name, _ in c.resources] for c in (MNIST, FashionMNIST)])"
        )
        names = [[file.name for file in IMAGE_SETS[n].published] for n in ("mnist", "fmnist")]
        assert done.stdout.strip() == str(names)
