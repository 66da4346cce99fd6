# SPDX-License-Identifier: Apache-2.0
"""Bring what was written to a file to its drive, on every platform."""

from __future__ import annotations

import errno
import fcntl
import os

# On macOS, fsync leaves data in the drive's own cache, which is lost if power fails; this command
# empties that cache, too. Other platforms do so in fsync, and do not have the command.
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
_NO_SUCH_COMMAND = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)


def sync(descriptor: int) -> None:
    """Bring the data of an open file or folder to its drive.

    On macOS, some file systems (of a network, for instance) cannot empty the drive's cache. Files
    there get what fsync does.

    Raises:
        OSError: writing failed.
    """
    if _FULL_SYNC is not None:
        try:
            fcntl.fcntl(descriptor, _FULL_SYNC)
            return
        except OSError as error:
            if error.errno not in _NO_SUCH_COMMAND:
                raise
    os.fsync(descriptor)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Bring the names of the files in a folder to its drive.

    Raises:
        OSError: the folder cannot be opened, or writing failed.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
