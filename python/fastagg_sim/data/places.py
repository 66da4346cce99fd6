# SPDX-License-Identifier: Apache-2.0
"""Places that may contain the files of a data set: folders, and tar archives in them."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from lzma import LZMAError
from pathlib import Path
from typing import Protocol

from fastagg_sim.data.base import CorruptDataError

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")


class Place(Protocol):
    """A flat set of named files."""

    path: Path

    def names(self) -> set[str]:
        """Return the names of the files in this place, without folders."""

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Return the contents of the files `names`, in the same order."""


class Folder:
    """The files directly in one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> set[str]:
        return {entry.name for entry in os.scandir(self.path) if entry.is_file()}

    def read(self, names: Sequence[str]) -> list[bytes]:
        try:
            return [(self.path / name).read_bytes() for name in names]
        except OSError as error:
            raise CorruptDataError(f"cannot be read ({error})") from error


class Archive:
    """The files in all folders of a tar archive. Nothing is unpacked to disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> set[str]:
        return {Path(member.name).name for member, _ in self._files()}

    def read(self, names: Sequence[str]) -> list[bytes]:
        contents: dict[str, bytes] = {}
        for member, tar in self._files():
            name = Path(member.name).name
            stream = tar.extractfile(member) if name in names else None
            if stream is not None:
                contents[name] = stream.read()
        return [contents[name] for name in names]

    def _files(self) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
        try:
            with tarfile.open(self.path) as tar:
                for member in tar:
                    if member.isfile():
                        yield member, tar
        except (tarfile.TarError, OSError, EOFError, zlib.error, LZMAError) as error:
            raise CorruptDataError(f"truncated or damaged archive ({error})") from error


def find_places(root: Path) -> Iterator[Place]:
    """Yield `root` if it is an archive, else `root` and all folders and archives under it."""
    if root.is_file():
        yield Archive(root)
    for folder, subfolders, files in os.walk(root):
        subfolders.sort()
        yield Folder(Path(folder))
        for name in sorted(files):
            if name.endswith(ARCHIVE_SUFFIXES):
                yield Archive(Path(folder) / name)
