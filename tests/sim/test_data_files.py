# SPDX-License-Identifier: Apache-2.0
"""Reading the original files: each format, plain and packed, valid and invalid."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastagg_sim.data.base import CorruptDataError, DataNotFoundError
from fastagg_sim.data.cifar import parse_binary, parse_json_labels, parse_png, parse_python
from fastagg_sim.data.idx import parse_idx
from fastagg_sim.data.images import CIFAR10, MNIST, ImageSet, RawImages
from tests.sim.made_data import idx, python2_batch

RNG = np.random.RandomState(0)
IMAGES = RNG.randint(0, 256, (3, 4, 5), np.uint8)


class TestIdx:
    @pytest.mark.parametrize("pack", [bytes, gzip.compress])
    def test_round_trip(self, pack: Callable[[bytes], bytes]) -> None:
        assert np.array_equal(parse_idx(pack(idx(IMAGES)), 3), IMAGES)
        labels = np.arange(7, dtype=np.uint8)
        assert np.array_equal(parse_idx(pack(idx(labels)), 1), labels)

    @pytest.mark.parametrize("cut", [0, 1, 3, 15, 16, 75])
    def test_truncated(self, cut: int) -> None:
        with pytest.raises(CorruptDataError):
            parse_idx(idx(IMAGES)[:cut], 3)

    @pytest.mark.parametrize("cut", [2, 10, 40, -8, -1])
    def test_truncated_gzip(self, cut: int) -> None:
        with pytest.raises(CorruptDataError, match="truncated or damaged gzip file"):
            parse_idx(gzip.compress(idx(IMAGES))[:cut], 3)

    def test_damaged_gzip(self) -> None:
        content = bytearray(gzip.compress(idx(IMAGES)))
        content[30] ^= 0xFF
        with pytest.raises(CorruptDataError, match="truncated or damaged gzip file"):
            parse_idx(bytes(content), 3)

    def test_too_long(self) -> None:
        with pytest.raises(CorruptDataError, match="says 3x4x5 = 60 bytes, but 61 follow"):
            parse_idx(idx(IMAGES) + b"x", 3)

    def test_wrong_magic(self) -> None:
        with pytest.raises(CorruptDataError, match="starts with 0x00000803, expected 0x00000801"):
            parse_idx(idx(IMAGES), 1)
        with pytest.raises(CorruptDataError, match="not an IDX file of 3-dimensional bytes"):
            parse_idx(b"<!DOCTYPE html>" * 9, 3)

    def test_a_size_beyond_memory_is_refused(self) -> None:
        header = struct.pack(">BBBB3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1)
        with pytest.raises(CorruptDataError, match="bytes, but 0 follow"):
            parse_idx(header, 3)


def png_strip(images: np.ndarray) -> bytes:
    stream = io.BytesIO()
    rows = images.reshape(-1, 3, 1024).transpose(0, 2, 1)
    Image.fromarray(np.ascontiguousarray(rows)).save(stream, "PNG")
    return stream.getvalue()


def binary_batch(images: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None], images.reshape(-1, 3072)], axis=1).tobytes()


X = RNG.randint(0, 256, (12, 3, 32, 32), np.uint8)
Y = RNG.randint(0, 10, 12).astype(np.uint8)
TINY_CIFAR = replace(
    CIFAR10, sizes=(10, 2), sha256=RawImages(X[:10], Y[:10], X[10:], Y[10:]).sha256()
)


def cifar_files(kind: str) -> dict[str, bytes]:
    """The tiny CIFAR-10, two images per batch, as files of one `kind`."""
    stems = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    batches = [(stem, X[2 * i : 2 * i + 2], Y[2 * i : 2 * i + 2]) for i, stem in enumerate(stems)]
    if kind == "binary":
        return {f"{stem}.bin": binary_batch(x, y) for stem, x, y in batches}
    if kind == "python":
        return {stem: python2_batch(x, y.tolist()) for stem, x, y in batches}
    strips = {f"{stem}.png": png_strip(x) for stem, x, _ in batches}
    labels = {"train_lables.json": Y[:10].tolist(), "test_lables.json": Y[10:].tolist()}
    return strips | {name: json.dumps(listed).encode() for name, listed in labels.items()}


def put(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def pack(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


class TestCifar:
    @pytest.mark.parametrize("kind", ["binary", "python", "strips"])
    def test_all_formats_give_the_same_arrays(self, kind: str, tmp_path: Path) -> None:
        put(tmp_path / "deep" / "down", cifar_files(kind))
        raw = TINY_CIFAR.read_from(tmp_path)
        assert np.array_equal(raw.train_x, X[:10])
        assert np.array_equal(raw.train_y, Y[:10])
        assert np.array_equal(raw.test_x, X[10:])
        assert np.array_equal(raw.test_y, Y[10:])

    @pytest.mark.parametrize("kind", ["binary", "python", "strips"])
    def test_archives(self, kind: str, tmp_path: Path) -> None:
        pack(tmp_path / "cifar.tar.gz", cifar_files(kind))
        assert TINY_CIFAR.read_from(tmp_path).sha256() == TINY_CIFAR.sha256
        assert TINY_CIFAR.read_from(tmp_path / "cifar.tar.gz").sha256() == TINY_CIFAR.sha256

    def test_a_complete_format_replaces_a_broken_one(self, tmp_path: Path) -> None:
        put(tmp_path, cifar_files("strips") | cifar_files("binary") | {"data_batch_3.bin": b"x"})
        assert TINY_CIFAR.read_from(tmp_path).sha256() == TINY_CIFAR.sha256

    def test_truncated_archive(self, tmp_path: Path) -> None:
        pack(tmp_path / "cifar.tar.gz", cifar_files("binary"))
        content = (tmp_path / "cifar.tar.gz").read_bytes()
        for cut in (0, 5, len(content) // 2):
            (tmp_path / "cifar.tar.gz").write_bytes(content[:cut])
            with pytest.raises(CorruptDataError, match="truncated or damaged archive"):
                TINY_CIFAR.read_from(tmp_path)

    def test_binary_of_another_size(self) -> None:
        for content in (b"", b"x" * 3072):
            with pytest.raises(
                CorruptDataError, match="expected a whole number of 3073-byte records"
            ):
                parse_binary(content)

    def test_png_of_another_kind(self) -> None:
        strip = png_strip(X[:2])
        with pytest.raises(CorruptDataError, match="truncated or damaged PNG"):
            parse_png(strip[:-500])
        with pytest.raises(CorruptDataError, match="truncated or damaged PNG"):
            parse_png(b"GIF89a")
        stream = io.BytesIO()
        Image.new("L", (1024, 2)).save(stream, "PNG")
        with pytest.raises(
            CorruptDataError, match="expected 1024 RGB pixels per row, got 1024 of L"
        ):
            parse_png(stream.getvalue())

    @pytest.mark.parametrize(
        "content", [b"[1, 2", b"{}", b"[1, 10]", b"[1, -1]", b"[1.0]", b"\xff"]
    )
    def test_json_of_another_kind(self, content: bytes) -> None:
        with pytest.raises(CorruptDataError):
            parse_json_labels(content)


class TestPickledBatch:
    def test_python3_reads_the_handmade_batch_alike(self) -> None:
        # The handmade opcodes are a valid pickle: the real unpickler with real numpy agrees.
        content = python2_batch(X[:2], [3, 4]).replace(b"numpy.core.", b"numpy._core.")
        batch = pickle.loads(content, encoding="bytes")
        assert np.array_equal(batch[b"data"], X[:2].reshape(2, 3072))

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_a_malicious_pickle_is_refused_before_it_does_anything(
        self, protocol: int, tmp_path: Path
    ) -> None:
        victim = tmp_path / "touched"

        class Malicious:
            def __reduce__(self) -> tuple[object, ...]:
                return os.mkdir, (str(victim),)

        content = pickle.dumps({"data": Malicious(), "labels": [1]}, protocol)
        with pytest.raises(
            CorruptDataError, match=r"refers to (posix|nt)\.mkdir, which is refused"
        ):
            parse_python(content)
        assert not victim.exists()

    @pytest.mark.parametrize(
        "content",
        [
            b"cbuiltins\neval\n(U\x011tR.",
            b"c__builtin__\neval\n(U\x011tR.",
            b"cnumpy\nload\n(U\x011tR.",
            b"cnumpy.core.multiarray\nscalar\n.",
            b"c_codecs\nencode\n(U\x011tR.",
            b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.",
        ],
    )
    def test_any_other_name_is_refused(self, content: bytes) -> None:
        with pytest.raises(CorruptDataError, match="which is refused"):
            parse_python(content)

    def test_what_is_not_a_batch(self) -> None:
        batch = python2_batch(X[:2], [3, 4])
        contents = [
            b"",
            b"hello",
            batch[:-1],
            batch[: len(batch) // 2],
            pickle.dumps([1, 2]),
            pickle.dumps({b"data": 1, b"labels": [1]}),
            batch.replace(b"U\x02u1", b"U\x02i1"),
            batch.replace(b"M\x00\x0c\x86", b"M\x00\x06\x86"),
            batch.replace(b"K\x03K\x04e", b"K\x03K\x0be"),
        ]
        for content in contents:
            with pytest.raises(CorruptDataError):
                parse_python(content)


def tiny_mnist() -> tuple[ImageSet, dict[str, bytes]]:
    """Six training and three test images of 4x5, as the four IDX files."""
    x = RNG.randint(0, 256, (9, 1, 4, 5), np.uint8)
    y = np.arange(9, dtype=np.uint8)
    raw = RawImages(x[:6], y[:6], x[6:], y[6:])
    files = {
        "train-images-idx3-ubyte": idx(raw.train_x[:, 0]),
        "train-labels-idx1-ubyte": idx(raw.train_y),
        "t10k-images-idx3-ubyte": idx(raw.test_x[:, 0]),
        "t10k-labels-idx1-ubyte": idx(raw.test_y),
    }
    return replace(MNIST, shape=(1, 4, 5), sizes=(6, 3), sha256=raw.sha256()), files


class TestFindingTheFiles:
    def test_spellings(self, tmp_path: Path) -> None:
        images, files = tiny_mnist()
        spelled = [
            files,
            {f"{name}.gz": gzip.compress(content) for name, content in files.items()},
            {name.replace("-idx", ".idx"): content for name, content in files.items()},
        ]
        mixed = dict(files)
        mixed["t10k-labels-idx1-ubyte.gz"] = gzip.compress(mixed.pop("t10k-labels-idx1-ubyte"))
        for i, found in enumerate([*spelled, mixed]):
            put(tmp_path / str(i), found)
            assert images.read_from(tmp_path / str(i)).sha256() == images.sha256

    def test_the_hash_tells_data_sets_with_the_same_file_names_apart(self, tmp_path: Path) -> None:
        images, files = tiny_mnist()
        other, other_files = tiny_mnist()
        put(tmp_path / "a", files)
        put(tmp_path / "b", other_files)
        assert images.read_from(tmp_path).sha256() == images.sha256
        assert other.read_from(tmp_path).sha256() == other.sha256
        with pytest.raises(CorruptDataError, match=r"this is not MNIST: .* SHA-256"):
            images.read_from(tmp_path / "b")

    def test_one_changed_byte_is_noticed(self, tmp_path: Path) -> None:
        images, files = tiny_mnist()
        for name in files:
            wrong = bytearray(files[name])
            wrong[-1] ^= 1
            put(tmp_path, files | {name: bytes(wrong)})
            with pytest.raises(CorruptDataError, match="this is not MNIST"):
                images.read_from(tmp_path)

    def test_wrong_sizes(self, tmp_path: Path) -> None:
        images, files = tiny_mnist()
        put(tmp_path, files | {"t10k-labels-idx1-ubyte": idx(np.zeros(2, np.uint8))})
        with pytest.raises(CorruptDataError, match=r"expected 3 test images of shape \(1, 4, 5\)"):
            images.read_from(tmp_path)

    def test_missing(self, tmp_path: Path) -> None:
        images, files = tiny_mnist()
        with pytest.raises(DataNotFoundError, match="does not exist"):
            images.read_from(tmp_path / "nowhere")
        files.pop("train-labels-idx1-ubyte")
        put(tmp_path, files)
        with pytest.raises(DataNotFoundError, match=r"none of its files under .*; expected train-"):
            images.read_from(tmp_path)
