# SPDX-License-Identifier: Apache-2.0
"""The results folder of a run.

RESULTS/config.json       the configuration; `fastagg-sim run --config` repeats the run
RESULTS/inputs.json       digests of the files that jobs read (traces, lists of clients), by path;
                          only if there are some
RESULTS/reused.json       the folders from which jobs were taken (`--reuse`), by the key of the job
RESULTS/versions.json     versions of the software used, and the name of the GPU if one was used
RESULTS/jobs/KEY/         one folder per job: job.json, metrics.csv, timings.csv, done.json,
                          scores.csv (rule fdms), norms.csv (if Task.norm_rounds is set),
                          checkpoint/ (until the job is finished)
RESULTS/metrics.csv       all jobs: one row per job and round; a rerun writes the same bytes
RESULTS/timings.csv       all jobs: seconds per round; these vary from run to run
RESULTS/distances.csv     all jobs: distances between updates (if Task.distances is set)
RESULTS/memory.csv        all jobs: peaks of memory so far (if Task.memory is set); these vary, too
RESULTS/table.md, accuracy.png, time.png (if Task.latency is set), similarity.png, and the same
                          figures as .svg
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from fastagg_sim.config import Config, ConfigError, config_from_dict, to_json
from fastagg_sim.files import read_json, write_atomically
from fastagg_sim.input_files import (
    check_digests,
    digests,
    read_digests,
    same_content,
    write_digests,
)
from fastagg_sim.job_folder import JobFolder, check_same
from fastagg_sim.merged_files import merge, restore, reuse

_FEW = 3  # names of jobs in a message


@dataclass(frozen=True)
class ResultsFolder:
    """The results folder of one configuration."""

    path: Path
    config: Config

    @staticmethod
    def read(path: Path) -> ResultsFolder:
        """Open an existing results folder; the configuration is read from its config.json."""
        return ResultsFolder(path, read_config(path / "config.json"))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs out of the folder, which is created, within this context.

        The system releases the lock when the process ends, however it ends. The file `.running`,
        which says who holds it, may then be left behind; it has no effect.

        Raises ConfigError if another run holds the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        note = self.path / ".running"
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = note.read_text() if note.exists() else "another process"
                raise ConfigError(
                    f"{self.path}: another run uses this folder: {holder}; wait until it has "
                    "ended, or choose another --out"
                ) from None
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            note.write_text(f"process {os.getpid()} on {platform.node()}, since {started}")
            try:
                yield
            finally:
                note.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def prepare(self, sources: Sequence[Path] = ()) -> None:
        """Create the folder, or check that an existing one fits the configuration.

        The configuration may add methods, dropout settings and seeds to those of an existing
        folder. Finished jobs without files of their own are restored from the merged CSV files.
        A folder without digests of the files that its jobs read, as earlier versions wrote it,
        gets those of their present content.

        sources: results folders, or folders that contain some. Jobs that are not in this folder yet
            and that a source has with the same settings are copied from there; the file reused.json
            says from where.

        Raises ConfigError if the folder belongs to another task or to another content of the files
        that its jobs read, or contains jobs that are not part of this configuration, or if a source
        or a file does not exist.
        """
        file = self.path / "config.json"
        found = read_sources(sources)
        inputs = digests(self.config.jobs())
        old = read_config(file) if file.exists() else None
        restorable = set() if old is None else self._check_extends(old, file)
        check_digests(self.path, inputs)
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in self.job_folders():
            folder.prepare()
        restore(self.path, [f for f in self.job_folders() if f.job.key in restorable])
        self._reuse(found, inputs)
        write_digests(self.path, inputs)
        # A file of an earlier version, without newer settings, means the same and stays as it is.
        if old is None or json.loads(old.to_json()) != json.loads(self.config.to_json()):
            write_atomically(file, self.config.to_json())
        device = self.config.task.device
        write_atomically(self.path / "versions.json", json.dumps(versions(device), indent=2) + "\n")

    def _reuse(self, sources: Sequence[ResultsFolder], inputs: Mapping[str, str]) -> None:
        missing = {to_json(f.job): f for f in self.job_folders() if not f.started}
        file = self.path / "reused.json"
        taken = read_json(file) if file.exists() else {}
        if not isinstance(taken, dict):
            raise ConfigError(f"{file}: expected a folder by the key of a job, got {taken!r}")
        for source in sources:
            path = source.path
            if path.resolve() == self.path.resolve():
                continue
            jobs = (to_json(job) for job in source.config.jobs())
            wanted = [missing[job] for job in jobs if job in missing]
            theirs = read_digests(path)
            for folder in reuse(path, [f for f in wanted if same_content(f.job, theirs, inputs)]):
                taken[folder.job.key] = path.as_posix()
                del missing[to_json(folder.job)]
        if taken:
            write_atomically(file, json.dumps(taken, indent=2) + "\n")

    def _check_extends(self, old: Config, file: Path) -> set[str]:
        """Check that this configuration contains all jobs of `old`, and return their keys."""
        check_same(
            json.loads(old.to_json())["task"], json.loads(self.config.to_json())["task"], file
        )
        jobs = {job.key: job for job in self.config.jobs()}
        left_out = sorted(job.key for job in old.jobs() if job.key not in jobs)
        if left_out:
            more = f" and {len(left_out) - _FEW} more" if len(left_out) > _FEW else ""
            raise ConfigError(
                f"{file}: the folder contains jobs that this configuration leaves out "
                f"({', '.join(left_out[:_FEW])}{more}); give the same --seeds, methods and dropout "
                "settings as before or more, choose another --out, or delete the folder"
            )
        for job in old.jobs():
            check_same(json.loads(to_json(job)), json.loads(to_json(jobs[job.key])), file)
        return {job.key for job in old.jobs()}

    def job_folders(self) -> list[JobFolder]:
        return [JobFolder(self.path / "jobs" / job.key, job) for job in self.config.jobs()]

    def merge(self) -> None:
        """Concatenate the CSV files of the finished jobs, in the order of the configuration."""
        merge(self.path, self.job_folders())


def read_sources(sources: Sequence[Path]) -> list[ResultsFolder]:
    """Return the results folders among and below `sources`, the values of --reuse.

    Raises ConfigError if one of `sources` has none, or for a configuration that cannot be read.
    """
    found = []
    for source in sources:
        below = sorted(file.parent for file in source.rglob("config.json"))
        if not below:
            raise ConfigError(f"--reuse: expected a folder with results, got {source}")
        found += [ResultsFolder.read(path) for path in below]
    return found


def read_config(path: Path) -> Config:
    """Read the configuration in the JSON file `path`.

    Raises ConfigError if there is no such file or it does not contain a configuration.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: expected a configuration file, found none")
    return config_from_dict(read_json(path))


def versions(device: str) -> dict[str, str]:
    """Return the versions of the software that jobs on `device` use, and the name of the GPU."""
    names = ("fastagg", "torch", "numpy", "safetensors", "matplotlib")
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    if device == "cuda":
        found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name()}
    return found
