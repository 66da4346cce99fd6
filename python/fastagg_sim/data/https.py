# SPDX-License-Identifier: Apache-2.0
"""Download files by HTTPS, each checked by its size and SHA-256."""

from __future__ import annotations

import hashlib
import http.client
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fastagg_sim.data.base import CorruptDataError, DataNotFoundError

SILENCE = 30.0  # seconds without an answer until a server is given up
FILE_TIME = 600.0  # seconds for one file; the largest has 170 MB


@dataclass(frozen=True)
class RemoteFile:
    """A published file: its name, its size in bytes and its SHA-256."""

    name: str
    size: int
    sha256: str


def download(url: str, file: RemoteFile, path: Path) -> None:
    """Download `file` from `url` to `path`, which exists only when it is complete and checked.

    Raises DataNotFoundError if the server cannot be reached, refuses, or takes too long;
    CorruptDataError if what it sends is another file. Part of a file is never kept.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "fastagg-sim"})
        opener = urllib.request.build_opener(_StayOnHttps)
        with opener.open(request, timeout=SILENCE) as answer, part.open("wb") as target:
            size, sha256 = _copy(answer, target, url, file.size)
        if (size, sha256) != (file.size, file.sha256):
            raise CorruptDataError(
                f"{url}: expected {file.size} bytes with SHA-256 {file.sha256}, "
                f"got {size} bytes with SHA-256 {sha256}"
            )
        part.replace(path)
    except (OSError, http.client.HTTPException) as error:
        raise DataNotFoundError(f"{url}: {error or type(error).__name__}") from error
    finally:
        part.unlink(missing_ok=True)


def _copy(
    answer: http.client.HTTPResponse, target: IO[bytes], url: str, most: int
) -> tuple[int, str]:
    """Write `answer` to `target` and return its size and SHA-256."""
    digest, size, end = hashlib.sha256(), 0, time.monotonic() + FILE_TIME
    while block := answer.read1(1 << 20):
        size += len(block)
        if size > most:
            raise CorruptDataError(f"{url}: expected {most} bytes, got more")
        if time.monotonic() > end:
            raise DataNotFoundError(f"{url}: took longer than {FILE_TIME:.0f} s")
        digest.update(block)
        target.write(block)
    return size, digest.hexdigest()


class _StayOnHttps(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never from HTTPS to something else."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urllib.parse.urlsplit(newurl).scheme not in ("https", req.type):
            raise DataNotFoundError(f"{req.full_url}: refused its redirect to {newurl}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
