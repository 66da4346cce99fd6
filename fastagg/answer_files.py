# SPDX-License-Identifier: Apache-2.0
"""The answers of an inbox on disk: a file each, which survives the end of the process.

A file is a checkpoint without a rule: it has a digest and is written atomically. Its name says
whether the answer waits or was used, and in which round::

    answer-SERIAL          it waits
    used-ROUND-SERIAL      a step of this round has used it, or tried to

Serial numbers ascend in the order of arrival.
"""

from __future__ import annotations

import fcntl
import os
import re
import warnings
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastagg import checkpoint
from fastagg.checkpoint import CheckpointError
from fastagg.durable import sync_folder
from fastagg.options import MOST

MOST_NOTE = 1 << 18
"""Largest size of a note as JSON, in bytes. In a header, which may have four times as much, quotes
and backslashes are escaped."""

_KIND = "inbox.answer"  # in the place of a rule's name in an aggregator's checkpoint
_NAME = re.compile(r"(?:answer|used-(?P<round>[0-9]{19}))-(?P<serial>[0-9]{19})")
_PARTIAL = re.compile(r"\.answer-[0-9]{19}\.[0-9a-f]{16}\.partial")


@dataclass(frozen=True, eq=False)
class StoredAnswer:
    """One row of one client.

    Attributes:
        serial: its number in the order of arrival.
        client: the id of the client, or its name.
        round: the round whose model it started from.
        row: [d] float32, contiguous.
        note: what else is kept of it, for JSON.
        run: name of the run.
    """

    serial: int
    client: int | str
    round: int
    row: Tensor
    note: dict[str, Any] = field(default_factory=dict)
    run: str = ""


def _free(descriptor: int, owner: int) -> None:
    """Close a locked descriptor, and free the lock in the process that took it.

    A forked child has the same lock: it keeps the lock of the parent while it lives, and must not
    free it.
    """
    if os.getpid() == owner:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


class AnswerFiles:
    """The files of one inbox, in a folder that no other process may use at the same time.

    The folder is free again after :meth:`close`, or when this object is gone, also if a forked
    child of the process lives on. Only the process that made this object may change the files.

    Args:
        folder: created if it does not exist.

    Raises:
        OSError: the folder cannot be made or opened.
        ValueError: another inbox uses the folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)
        self._process = os.getpid()
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        self._release = weakref.finalize(self, _free, descriptor, self._process)
        self._release.atexit = False  # threads may still write when the interpreter exits
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ValueError(f"folder: another inbox uses {self.folder}; close it first") from None
        except OSError as error:  # a file system without locks
            warnings.warn(
                f"folder: {self.folder} cannot be locked ({error}), so a second inbox that uses it "
                "would go unnoticed",
                stacklevel=3,
            )

    def close(self) -> None:
        """Let other inboxes use the folder. The files stay. A second call does nothing."""
        self._release()

    def check_process(self) -> None:
        """Check that this process may change the files: a forked child knows nothing of new ones.

        Raises:
            RuntimeError: another process made this object.
        """
        if self._process != os.getpid():
            raise RuntimeError(
                f"inbox: this process was forked from process {self._process}, whose answers in "
                f"{self.folder} it would replace or delete; use the inbox in that process only"
            )

    def load(
        self, num_clients: int | None, num_params: int, rounds: int, run: str = ""
    ) -> tuple[list[StoredAnswer], dict[str, str], int]:
        """Read the answers that wait, in the order of arrival.

        Answers that were used in a round before ``rounds`` are deleted. Those that were used in a
        later one wait again: the model and the rule are from before that round.

        Args:
            num_clients: K; None: clients have names.
            num_params: d.
            rounds: the rounds of the model and of the rule.
            run: name of the run.

        Returns:
            The answers; the reasons why files cannot be read, by name (they stay where they are);
            and the next serial number.

        Raises:
            OSError: a file cannot be renamed or deleted.
            ValueError: an answer is of another run. Nothing has changed.
        """
        found: list[StoredAnswer] = []
        damaged: dict[str, str] = {}
        following = 0
        names = sorted(os.listdir(self.folder))
        for name in names:
            self._check_run(name, run)
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None:
                if _PARTIAL.fullmatch(name):  # its writer was killed
                    (self.folder / name).unlink()
                continue
            serial = int(match["serial"])
            following = max(following, serial + 1)
            if match["round"] is not None:
                if int(match["round"]) < rounds:
                    (self.folder / name).unlink()
                    continue
                os.rename(self.folder / name, self.path(serial))
            try:
                found.append(_read(self.path(serial), serial, num_clients, num_params))
            except (OSError, ValueError) as error:
                damaged[self.path(serial).name] = str(error)
        sync_folder(self.folder)
        return sorted(found, key=lambda answer: answer.serial), damaged, following

    def _check_run(self, name: str, run: str) -> None:
        """Raise ValueError if a file has an answer of another run; damaged ones are passed over."""
        if _NAME.fullmatch(name) is None:
            return
        try:
            with checkpoint.opened(self.folder / name) as saved:
                other = saved.options.get("run", "") if saved.rule == _KIND else run
                if other != run:
                    saved.read({})  # a damaged file may show any name
        except (OSError, ValueError):
            return
        if other != run:
            raise ValueError(
                f"folder: expected answers of the run {run!r}, got one of {str(other)[:100]!r} in "
                f"{self.folder / name}; use another folder, or empty it if they are not needed"
            )

    def write(self, answer: StoredAnswer) -> None:
        """Write the file of an answer.

        Raises:
            OSError: it cannot be written; no file is left.
        """
        content: dict[str, Any] = {"client": answer.client, "round": answer.round}
        content |= {"note": answer.note} if answer.note else {}
        content |= {"run": answer.run} if answer.run else {}
        path = self.path(answer.serial)
        try:
            checkpoint.write(path, _KIND, content, {"row": answer.row})
        except BaseException:
            with suppress(OSError):  # it may be there if only the folder could not be synced
                path.unlink()
            raise

    def delete(self, answers: Iterable[StoredAnswer]) -> None:
        """Delete the files of answers that wait.

        Raises:
            OSError: one cannot be deleted.
        """
        for answer in answers:
            try:
                self.path(answer.serial).unlink()
            except FileNotFoundError:
                for path in self._marked(answer):
                    path.unlink(missing_ok=True)

    def mark(self, answers: Iterable[StoredAnswer], rounds: int) -> None:
        """Note that answers are used in round ``rounds``.

        Raises:
            OSError: a file cannot be renamed or written; all of them wait as before.
        """
        marked = []
        try:
            for answer in answers:
                os.rename(self._file(answer), self._used(answer.serial, rounds))
                marked.append(answer)
            sync_folder(self.folder)
        except BaseException:
            self.unmark(marked, rounds)
            raise

    def unmark(self, answers: Iterable[StoredAnswer], rounds: int) -> None:
        """Note that answers that were marked for round ``rounds`` wait again.

        A file that cannot be renamed waits again after a restart from a checkpoint of this round,
        and :meth:`mark` finds it.
        """
        for answer in answers:
            with suppress(OSError):
                os.rename(self._used(answer.serial, rounds), self.path(answer.serial))
        with suppress(OSError):  # before a checkpoint, after which marked files are deleted
            sync_folder(self.folder)

    def settle(self, rounds: int) -> None:
        """Delete the answers that were used in rounds before ``rounds``.

        Raises:
            OSError: a file cannot be deleted.
        """
        for name in os.listdir(self.folder):
            match = _NAME.fullmatch(name)
            if match is not None and match["round"] is not None and int(match["round"]) < rounds:
                (self.folder / name).unlink(missing_ok=True)

    def _file(self, answer: StoredAnswer) -> Path:
        """Return the file of an answer that waits.

        If a call was interrupted, or a file could not be renamed, it is still marked. If it was
        deleted since, as :meth:`settle` does with marked ones, it is written again.
        """
        path = self.path(answer.serial)
        if path.exists():
            return path
        for marked in self._marked(answer):
            return marked
        self.write(answer)
        return path

    def _marked(self, answer: StoredAnswer) -> list[Path]:
        return sorted(self.folder.glob(f"used-*-{answer.serial:019d}"))

    def path(self, serial: int) -> Path:
        return self.folder / f"answer-{serial:019d}"

    def _used(self, serial: int, rounds: int) -> Path:
        return self.folder / f"used-{rounds:019d}-{serial:019d}"


def _read(path: Path, serial: int, num_clients: int | None, num_params: int) -> StoredAnswer:
    """Read one file.

    Raises:
        OSError: it cannot be read.
        CheckpointError: it is damaged, or not an answer for K clients (or of a name, for None) and
            d parameters.
    """
    with checkpoint.opened(path) as saved:
        if saved.rule != _KIND or saved.names != ["row"]:
            raise CheckpointError(path, f"expected an answer, got {saved.rule[:200]!r}")
        entry, client, rounds = (
            saved.entries["row"],
            saved.options.get("client"),
            saved.options.get("round"),
        )
        if num_clients is None:
            if not isinstance(client, str):
                raise CheckpointError(path, "client: expected a name")
        elif type(client) is not int or not 0 <= client < num_clients:
            raise CheckpointError(path, f"client: expected an id in [0, {num_clients})")
        if type(rounds) is not int or not 0 <= rounds <= MOST:
            raise CheckpointError(path, f"round: expected a number in [0, {MOST}]")
        if entry.dtype != torch.float32 or entry.shape != (num_params,):
            raise CheckpointError(
                path, f"row: expected float32 [{num_params}], got {entry.dtype} {[*entry.shape]}"
            )
        note, run = saved.options.get("note", {}), saved.options.get("run", "")
        if not isinstance(note, dict) or not isinstance(run, str):
            raise CheckpointError(path, "note, run: expected values by name, and a text")
        row = torch.empty(num_params, dtype=torch.float32, device="cpu")
        saved.read({"row": [row]})
    return StoredAnswer(serial, client, rounds, row, note, run)
