# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of files: a crash at any moment leaves the old file or the new one."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fastagg.durable import sync, sync_folder

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def replace_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, replacing an older one atomically.

    Raises:
        OSError: the folder does not exist or is not writable. An older file is unchanged.
    """
    replace(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def replace(target: Path, fill: Callable[[Path], object], *, keep: int = 1) -> None:
    """Write a file beside ``target``, sync it to disk and rename it to ``target``.

    Only the owner may read the new file (mode 0600). Each call writes to a name of its own, so
    several threads, processes and containers may replace one target; the last rename wins. A call
    deletes what earlier calls for the same target left behind when their process was killed.

    Args:
        target: the file to replace; its folder must exist. A symbolic link is followed: the file
            that it leads to is replaced.
        fill: writes the new content to the path that it is called with.
        keep: number of files to keep: ``target`` and, in ``target.1``, ``target.2``, ..., the files
            that it replaced, the newest first.

    Raises:
        OSError: the folder does not exist or is not writable, the disk is full, a write failed, or
            ``target`` is not a regular file: a folder, a device, a pipe or a loop of links.
            Files with the numbers of ``keep`` must be regular, too, or symbolic links, which are
            not followed. The error names ``target``, or the file with a number. Older files are
            unchanged, and no other file is left behind unless it cannot be deleted either; the
            next call does that. If the message says that the folder was not synced, the new file
            is there but may be lost if power fails.
        Exception: whatever ``fill`` raises. An older file is unchanged.
    """
    target = Path(os.path.realpath(target))
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"path: expected an existing folder, but {target.parent} does not exist; create it "
            "first"
        )
    _check_regular(target)
    for age in range(1, keep):
        older = Path(f"{target}.{age}")
        if not older.is_symlink():
            _check_regular(older)
    try:
        _remove_orphans(target)
        partial, descriptor = _create(target)
        try:
            fill(partial)
            sync(descriptor)
            if keep > 1:
                _rotate(target, partial, keep)
            else:
                os.replace(partial, target)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        finally:
            os.close(descriptor)  # releases the lock
    except OSError as error:
        raise _naming(target, error, "cannot be written") from error
    try:
        sync_folder(target.parent)
    except OSError as error:
        raise _naming(target, error, "was written, but its folder was not synced") from error


def _check_regular(target: Path) -> None:
    """Refuse to replace a folder, device or pipe: a rename would delete some of them."""
    try:
        mode = os.lstat(target).st_mode
    except OSError:  # there is none, or the next call says what is wrong
        return
    if not stat.S_ISREG(mode):
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EEXIST
        raise OSError(code, "cannot be written: expected a regular file or none", str(target))


def _naming(target: Path, error: OSError, what: str) -> OSError:
    """Return an error of the same number that names ``target``."""
    if error.errno is None:  # not from the system
        return error
    return OSError(error.errno, f"{what}: {error.strerror}", str(target))


def _partial(target: Path) -> Path:
    """Return a new name for a file beside ``target``."""
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")


def _create(target: Path) -> tuple[Path, int]:
    """Create an empty file beside ``target`` and lock it; return its path and descriptor.

    The lock shows other processes that the writer is alive.
    """
    while True:
        partial = _partial(target)
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with suppress(BlockingIOError):  # another process takes the new file for an orphan
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_open(partial, descriptor):
                    return partial, descriptor
        except OSError:  # a file system without locks: nothing is ever taken for an orphan there
            return partial, descriptor
        os.close(descriptor)


def _remove_orphans(target: Path) -> None:
    """Delete files of writers of ``target`` that have ended: no process locks them."""
    own = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{16}\.partial")
    for name in os.listdir(target.parent):
        if not own.fullmatch(name):
            continue
        path = target.with_name(name)
        with suppress(OSError):  # it is locked, or another process deleted it
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_open(path, descriptor):
                    path.unlink()
            finally:
                os.close(descriptor)


def _is_open(path: Path, descriptor: int) -> bool:
    """Return whether ``path`` still names the open file."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(descriptor))


def _link(source: Path, link: Path) -> None:
    """Make a second name of a file; a copy, on file systems without hard links (FAT, many FUSE)."""
    try:
        os.link(source, link)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with source.open("rb") as old, link.open("xb") as new:
            shutil.copyfileobj(old, new)
            os.fchmod(new.fileno(), stat.S_IMODE(os.fstat(old.fileno()).st_mode))
            new.flush()
            sync(new.fileno())


def _rotate(target: Path, partial: Path, keep: int) -> None:
    """Rename ``partial`` to ``target``, ``target`` to ``target.1``, that to ``target.2`` and so on.

    At any moment there is a complete file at ``target``. If a call fails, those before it are taken
    back. What needs room on the disk, an entry for one more name, comes first.
    """
    if not target.exists():
        os.replace(partial, target)
        return
    link, oldest = _partial(target), _partial(target)
    made: list[Path] = []
    renamed: list[tuple[str | Path, str | Path]] = []
    ages = range(keep - 1, 1, -1)
    renames: list[tuple[str | Path, str | Path]] = [
        (f"{target}.{keep - 1}", oldest),
        *((f"{target}.{age - 1}", f"{target}.{age}") for age in ages),
        (link, f"{target}.1"),
    ]
    try:
        made.append(link)
        _link(target, link)
        for old, new in renames:
            with suppress(FileNotFoundError):
                os.replace(old, new)
                renamed.append((old, new))
        os.replace(partial, target)
    except BaseException:
        for old, new in reversed(renamed):
            with suppress(OSError):
                os.replace(new, old)
        for name in made:
            with suppress(OSError):
                name.unlink()
        raise
    for name in (oldest, link):
        with suppress(OSError):  # the next call deletes it
            name.unlink()
