# SPDX-License-Identifier: Apache-2.0
"""Let disks fail at every write of checkpoints, memory rows and results.

    make fuzz-disks

Every writer is tried with every fault at every point, in a process of its own:

- "io": the n-th call that changes files fails with EIO, for every n.
- "full": from the n-th call on, calls that need room on the disk fail with ENOSPC; the first write
  that fails has written half of its bytes.
- "read-only": from the n-th call on, all calls that change files fail with EROFS.
- "size": files may have at most n bytes (RLIMIT_FSIZE), for n from 0 up to the largest file.
- "tmpfs": a disk with n free pages, from 0 up to what is needed (only where the test may mount).

An attempt that fails must raise an OSError that names a file or folder, and leave the files that
there were as they were. With the fault gone, the next attempt must succeed, give the files of an
undisturbed one, and leave nothing else behind.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import types
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import fastagg
from fastagg.distributed import storage
from tests.fuzz.faults import Fault, Faults, build, start, why_not

CALLS = {"io": Fault.ONE_CALL, "full": Fault.DISK_FULL, "read-only": Fault.READ_ONLY}
_PAGE = 4096
K, D = 6, 700

Files = dict[str, bytes]


class Writer(ABC):
    """Something that writes files to a folder."""

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Write what there is before the attempt."""

    @abstractmethod
    def attempt(self, folder: Path) -> None:
        """Write. Called again after it failed."""

    def files(self, folder: Path) -> Files:
        """Return the files that must be intact after a failure, and equal after a success."""
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    def leftover(self, before: Files, now: Files) -> set[str]:
        """Return the names of files that a failed attempt must not leave behind."""
        return now.keys() - before.keys()


def _aggregator(rounds: int, **options: Any) -> fastagg.Aggregator:
    agg = fastagg.make("stale", num_clients=K, num_params=D, **options)
    generator, params = torch.Generator().manual_seed(1), torch.zeros(D)
    for _ in range(rounds):
        clients = torch.randperm(K, generator=generator)[:3]
        agg.step(params, torch.randn(3, D, generator=generator), clients)
    return agg


class Checkpoint(Writer):
    """``Aggregator.save`` over an older file."""

    keep = 1

    def prepare(self, folder: Path) -> None:
        for rounds in range(1, self.keep + 1):
            _aggregator(rounds).save(folder / "saved", keep=self.keep)

    def attempt(self, folder: Path) -> None:
        _aggregator(9).save(folder / "saved", keep=self.keep)


class Kept(Checkpoint):
    """``Aggregator.save`` with ``keep=3``, when there are three files."""

    keep = 3


class First(Checkpoint):
    """``Aggregator.save`` where there is no file."""

    def prepare(self, folder: Path) -> None:
        pass


class Sharded(Writer):
    """``ShardedAggregator.save`` on one rank, over an older checkpoint."""

    def prepare(self, folder: Path) -> None:
        self._write(folder, "0" * 16, rounds=1)

    def attempt(self, folder: Path) -> None:
        self._write(folder, "1" * 16, rounds=9)

    def files(self, folder: Path) -> Files:
        """Return the manifest and the file that it names; the next save deletes others."""
        manifest = storage.describe(folder).manifest
        names = [storage.MANIFEST, manifest.file(0)]
        return {name: (folder / name).read_bytes() for name in names}

    def leftover(self, before: Files, now: Files) -> set[str]:
        return set()

    def _write(self, folder: Path, generation: str, rounds: int) -> None:
        agg, split = _aggregator(rounds), ["memory", "total"]
        manifest = storage.Manifest("stale", D, D, [(0, D)], generation, split, [], {})
        ranks: Any = types.SimpleNamespace(rank=0, agree=self._agree)
        storage.write(folder, manifest, agg.options(), agg.live_state(), {}, ranks)

    def _agree(self, *_: object, error: Exception | None = None) -> None:
        if error is not None:
            raise error


class Text(Writer):
    """Results of the simulation: CSV and JSON files."""

    def prepare(self, folder: Path) -> None:
        (folder / "metrics.csv").write_text("old\n")

    def attempt(self, folder: Path) -> None:
        from fastagg_sim.files import write_atomically

        write_atomically(folder / "metrics.csv", "new\n" * 2000)


class Figure(Writer):
    """A figure of the simulation, as PNG and as SVG."""

    def prepare(self, folder: Path) -> None:
        self._draw(folder, [1.0, 2.0])

    def attempt(self, folder: Path) -> None:
        self._draw(folder, [2.0, 1.0])

    def _draw(self, folder: Path, values: list[float]) -> None:
        from fastagg_sim import plots

        figure, panel = plots.plt.subplots(figsize=(2, 1))
        panel.plot(values)
        plots.save(figure, folder / "figure.png")

    def leftover(self, before: Files, now: Files) -> set[str]:
        return {name for name in super().leftover(before, now) if name.endswith(".tmp")}


class Rows(Writer):
    """Memory rows in a folder: of a new rule, of a step, and of a loaded state."""

    def prepare(self, folder: Path) -> None:
        self._agg, self._params = None, torch.zeros(D)

    def attempt(self, folder: Path) -> None:
        if self._agg is None:
            self._agg = _aggregator(0, memory_folder=folder)
        before = {name: value.clone() for name, value in self._agg.state_dict().items()}
        params = self._params.clone()
        try:
            self._agg.step(self._params, torch.ones(4, D), [0, 1, 2, 5])
            self._agg.load_state_dict(_aggregator(3).state_dict())
        except OSError:
            now = self._agg.state_dict()
            stepped = not torch.equal(params, self._params)
            if not stepped and any(not torch.equal(now[name], before[name]) for name in now):
                raise AssertionError("a step that raised changed the state") from None
            raise


class Run(Writer):
    """The last rounds of a job of the simulation: rows of CSV files, checkpoints, results."""

    def prepare(self, folder: Path) -> None:
        self._folder(folder).prepare()
        self._go_on(folder, stop=True)

    def attempt(self, folder: Path) -> None:
        self._go_on(folder, stop=False)

    def files(self, folder: Path) -> Files:
        done = (folder / "done.json").exists()
        names = ["job.json", *(["metrics.csv", "done.json"] if done else [])]
        return {name: (folder / name).read_bytes() for name in names}

    def leftover(self, before: Files, now: Files) -> set[str]:
        return set()

    def _folder(self, folder: Path) -> Any:
        from fastagg_sim.config import Config, Dropout, LocalTraining, Method, Task
        from fastagg_sim.job_folder import JobFolder

        task = Task(
            dataset="digits",
            partition="clustered",
            model="logistic",
            training=LocalTraining(batch_size=10, local_epochs=1),
            rounds=3,
            num_clients=10,
            partition_options={"samples_per_client": 10},
        )
        dropouts = (Dropout("exact", {"alpha": 0.5}),)
        config = Config("run", task, (Method("fedavg", "fedavg"),), dropouts, seeds=(0,))
        return JobFolder(folder, config.jobs()[0])

    def _go_on(self, folder: Path, *, stop: bool) -> None:
        from fastagg_sim.runner import run_job

        run_job(self._folder(folder), lambda done, accuracy: None, lambda: stop, 0.0)


WRITERS: dict[str, type[Writer]] = {
    "save": Checkpoint,
    "save, first": First,
    "save, keep=3": Kept,
    "sharded": Sharded,
    "memory rows": Rows,
    "text": Text,
    "figure": Figure,
    "run": Run,
}


def judge(
    writer: Writer, folder: Path, before: Files, wanted: Files, error: Exception | None, kind: str
) -> str:
    """Return what happened; "wrong ..." if it must not."""
    now = writer.files(folder)
    if error is not None:
        if not isinstance(error, OSError):
            return f"wrong: {type(error).__name__}: {error}"
        if error.filename is None and str(folder) not in str(error):
            return f"wrong: the error names no file: {error!r}"
        synced = "was not synced" not in str(error)
        changed = [name for name in before if now.get(name) != before[name]]
        if changed and synced and not isinstance(writer, Figure):
            return f"wrong: {error}, but changed {changed}"
        left = writer.leftover(before, now)
        if left and synced and kind != "read-only":
            return f"wrong: {error}, but left {sorted(left)}"
        try:
            writer.attempt(folder)
        except Exception as second:
            return f"wrong: after {error}, the second attempt: {type(second).__name__}: {second}"
        if not synced:  # the file was written, and now once more
            return "raised OSError"
    final = writer.files(folder)
    if error is None and any(name.endswith(".partial") for name in final):
        writer.attempt(folder)  # a deletion failed; the next call deletes it
        final = {"saved": writer.files(folder)["saved"]}
        wanted = {"saved": wanted["saved"]}
        if any(name.endswith(".partial") for name in writer.files(folder)):
            return "wrong: a file of an earlier call is still there"
    if kind == "read-only" and "saved" in final:
        final, wanted = {"saved": final["saved"]}, {"saved": wanted["saved"]}
    if final != wanted:
        different = {name for name in final | wanted if final.get(name) != wanted.get(name)}
        return f"wrong: after {error}, other files {sorted(different)}"
    return "raised OSError" if error is not None else "returned"


def _undisturbed(name: str, folder: Path) -> tuple[Files, int]:
    writer = WRITERS[name]()
    folder.mkdir()
    writer.prepare(folder)
    writer.attempt(folder)
    wanted = writer.files(folder)
    size = max((len(data) for data in wanted.values()), default=0)
    shutil.rmtree(folder)
    return wanted, size


def calls(name: str, kind: str, root: Path, every: int) -> Counter[str]:
    """Let the n-th call that changes files fail, for every n, until an attempt makes fewer."""
    faults, found, n = Faults(), Counter[str](), 1
    wanted, _ = _undisturbed(name, root / "first")
    while True:
        writer, folder, error = WRITERS[name](), root / str(n), None
        folder.mkdir()
        writer.prepare(folder)
        before = writer.files(folder)
        with faults.armed(CALLS[kind], n):
            try:
                writer.attempt(folder)
            except Exception as raised:
                error = raised
        if not faults.failed:
            return found
        if (
            kind == "read-only"
        ):  # renames cannot be taken back either: the file itself must be there
            before = {key: value for key, value in before.items() if key == "saved"}
        result = judge(writer, folder, before, wanted, error, kind)
        found[result if not result.startswith("wrong") else f"{result} (call {n})"] += 1
        with suppress(OSError):
            shutil.rmtree(folder)
        n += every


def sizes(name: str, root: Path, every: int) -> Counter[str]:
    """Limit the size of files to 0, 1, ... bytes (in steps for large ones)."""
    found = Counter[str]()
    wanted, largest = _undisturbed(name, root / "first")
    for size in range(0, largest + 1, max(1, every * largest // 400)):
        writer, folder, error = WRITERS[name](), root / str(size), None
        folder.mkdir()
        writer.prepare(folder)
        before = writer.files(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))
        try:
            writer.attempt(folder)
        except Exception as raised:
            error = raised
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        result = judge(writer, folder, before, wanted, error, kind="size")
        found[result if not result.startswith("wrong") else f"{result} ({size} bytes)"] += 1
        shutil.rmtree(folder)
    return found


def pages(name: str, root: Path, every: int) -> Counter[str]:
    """Write to a disk with 0, 1, ... free pages until there is room enough."""
    found, free = Counter[str](), 0
    wanted, _ = _undisturbed(name, root / "first")
    disk = root / "disk"
    disk.mkdir()
    while True:
        with _mounted(disk):
            writer, folder, error = WRITERS[name](), disk / "folder", None
            folder.mkdir()
            writer.prepare(folder)
            before = writer.files(folder)
            filler = disk / "filler"
            with filler.open("wb", buffering=0) as file:
                status = os.statvfs(disk)
                file.write(b"x" * max(0, (status.f_bavail - free) * _PAGE))
            try:
                writer.attempt(folder)
            except Exception as raised:
                error = raised
            filler.unlink()
            result = judge(writer, folder, before, wanted, error, kind="tmpfs")
        found[result if not result.startswith("wrong") else f"{result} ({free} pages)"] += 1
        if error is None:
            return found
        free += every


@contextmanager
def _mounted(disk: Path) -> Iterator[None]:
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield
    finally:
        # Memory rows may still be mapped: -l lets the disk go with the last of them.
        subprocess.run(["umount", "-l", str(disk)], check=True, capture_output=True)


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as name:
        try:
            with _mounted(Path(name)):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("--every", type=int, default=1, help="try every n-th point")
    command.add_argument("--writers", nargs="+", default=[*WRITERS], choices=[*WRITERS])
    command.add_argument("--kinds", nargs="+", default=[*CALLS, "size", "tmpfs"])
    command.add_argument("--child", help=argparse.SUPPRESS)
    return command


def child(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    kind, total = options.child, Counter[str]()
    for writer in options.writers:
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            if kind == "size":
                found = sizes(writer, root, options.every)
            elif kind == "tmpfs":
                found = pages(writer, root, options.every)
            else:
                found = calls(writer, kind, root, options.every)
        for result, times in found.items():
            total[result.replace("wrong:", f"wrong: {writer}:", 1)] += times
    print(json.dumps(total))


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.child:
        child(options)
        return 0
    if reason := why_not():
        print(f"cannot inject faults: {reason}")
        return 2
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        library = build(Path(name))
        for kind in options.kinds:
            if kind == "tmpfs" and not can_mount():
                print("tmpfs: skipped, this process may not mount")
                continue
            given = [f"--child={kind}", f"--every={options.every}", "--writers", *options.writers]
            process = start(library, "tests.fuzz.disks", given)
            output, errors = process.communicate()
            total = Counter[str]()
            if process.returncode:
                total[f"wrong: died: {errors[-1500:]}"] += 1
            else:
                total.update(json.loads(output.splitlines()[-1]))
            print(f"{kind}: {total.total()} points", flush=True)
            for result, times in sorted(total.items()):
                print(f"  {result}: {times}")
                wrong += times * result.startswith("wrong")
    print("nothing went wrong" if not wrong else f"{wrong} went wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
