# SPDX-License-Identifier: Apache-2.0
"""Made-up data sets in the formats of real ones, and the places from which one is fetched."""

from __future__ import annotations

import io
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from fastagg_sim import data
from fastagg_sim.data.images import MNIST, ImageSet, RawImages


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def python2_batch(images: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2 pickled it for the CIFAR-10 site, opcode by opcode."""
    raw = images.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
        + b"(K\x01M"
        + struct.pack("<H", len(images))
        + b"M\x00\x0c\x86"
        + b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T"
        + struct.pack("<I", len(raw))
        + raw
        + b"tb"
    )
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    text = b"U\x0bbatch_labelU\x15training batch 1 of 5"
    return b"\x80\x02}(" + text + b"U\x06labels" + listed + b"U\x04data" + array + b"u."


class Tiny:
    """A fake MNIST of 6 + 3 images, its files, a cache folder and a folder of fake tools."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.RandomState(0)
        x = rng.randint(0, 256, (9, 1, 4, 5), np.uint8)
        y = np.arange(9, dtype=np.uint8)
        self.raw = RawImages(x[:6], y[:6], x[6:], y[6:])
        self.images: ImageSet = replace(
            MNIST,
            shape=(1, 4, 5),
            sizes=(6, 3),
            sha256=self.raw.sha256(),
            published=(),
            mirrors=(),
        )
        self.files = {
            "train-images-idx3-ubyte": idx(x[:6, 0]),
            "train-labels-idx1-ubyte": idx(y[:6]),
            "t10k-images-idx3-ubyte": idx(x[6:, 0]),
            "t10k-labels-idx1-ubyte": idx(y[6:]),
        }
        self.root = folder / "cache"
        self.tools = folder / "tools"
        self.modules = folder / "modules"
        self.source = folder / "source"
        for made in (self.tools, self.modules, self.source):
            made.mkdir()

    def put_files(self) -> None:
        for name, content in self.files.items():
            (self.source / name).write_bytes(content)

    def put_archive(self, path: Path) -> None:
        with tarfile.open(path, "w:gz") as tar:
            for name, content in self.files.items():
                member = tarfile.TarInfo(f"package/data/{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))

    def put_tool(self, name: str, script: str) -> None:
        tool = self.tools / name
        tool.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
        tool.chmod(0o755)

    def put_torchvision(self, datasets: str, utils: str = "download_url = None\n") -> None:
        """Make up a torchvision with these modules torchvision.datasets and its `utils`."""
        folder = self.modules / "torchvision"
        (folder / "datasets").mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "datasets" / "__init__.py").write_text(datasets)
        (folder / "datasets" / "utils.py").write_text(utils)

    def get(self, source_dir: Path | None = None) -> tuple[Path, list[str]]:
        said: list[str] = []
        path = data.fetch("mnist", source_dir=source_dir, root=self.root, progress=said.append)
        assert path is not None
        return path, said
