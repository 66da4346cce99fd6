# SPDX-License-Identifier: Apache-2.0
"""The CSV files of a results folder: the rows of all finished jobs, one after the other.

They are merged from the files of the jobs, and a job can be restored from them. A folder that was
copied or committed without `jobs/` is so continued: only what is new is computed. The results of
another experiment that has jobs of the same settings can be reused in the same way.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import fastagg
from fastagg.registry import find
from fastagg_sim.config import ConfigError, Task
from fastagg_sim.files import naming, write_atomically
from fastagg_sim.job_folder import JOB_COLUMNS, JobFolder

FILES = ("metrics.csv", "timings.csv", "distances.csv", "memory.csv")


def merge(path: Path, folders: Iterable[JobFolder]) -> None:
    """Write the CSV files in `path`: the rows of the finished jobs, in the order of `folders`."""
    finished = [folder for folder in folders if folder.finished]
    for name in FILES:
        parts = [folder.path / name for folder in finished]
        texts = [part.read_text().split("\n", 1) for part in parts if part.exists()]
        if texts:
            write_atomically(path / name, texts[0][0] + "\n" + "".join(t[1] for t in texts))


def restore(path: Path, folders: Iterable[JobFolder]) -> None:
    """Write the files of each job that the CSV files in `path` contain and its folder lacks.

    Jobs that have started are left alone. So are jobs that lack a file which is not merged:
    scores.csv of the rules that count pairs, and norms.csv if Task.norm_rounds is set.

    Raises ConfigError if a job has fewer rows than a finished job has; nothing is then restored.
    """
    missing = [
        folder for folder in folders if not folder.started and _has_own_files(folder.path, folder)
    ]
    merged = {name: _rows(path / name) for name in FILES if (path / name).exists()}
    if not missing or "metrics.csv" not in merged:
        return
    found = [folder for folder in missing if folder.columns in merged["metrics.csv"][1]]
    for folder in found:
        for name, (_, jobs) in merged.items():
            _check_complete(path / name, jobs.get(folder.columns, []), folder.job.task)
    for folder in found:
        for name, (header, jobs) in merged.items():
            write_atomically(folder.path / name, header + "".join(jobs[folder.columns]))
        folder.mark_done(len(merged["metrics.csv"][1][folder.columns]))


def reuse(source: Path, folders: Iterable[JobFolder]) -> list[JobFolder]:
    """Restore jobs from the results folder `source` of another configuration.

    folders: the folders of jobs whose settings `source` has, too. Jobs that have started are left
        alone, as by `restore`.

    Returns the folders that were restored. Raises ConfigError as `restore` does.
    """
    missing = []
    for folder in folders:
        own = source / "jobs" / folder.job.key
        if not folder.started and _has_own_files(own, folder):
            missing.append(folder)
            for name in _own_files(folder):
                with naming(folder.path / name):
                    shutil.copyfile(own / name, folder.path / name)
    restore(source, missing)
    return [folder for folder in missing if folder.finished]


def _own_files(folder: JobFolder) -> list[str]:
    """Return the names of the files of a finished job that are not merged."""
    names = ["norms.csv"] if folder.job.task.norm_rounds else []
    if issubclass(find(folder.job.method.rule, []), fastagg.FDMS):
        names.append("scores.csv")
    return names


def _has_own_files(path: Path, folder: JobFolder) -> bool:
    return all((path / name).exists() for name in _own_files(folder))


def _rows(path: Path) -> tuple[str, dict[tuple[str, ...], list[str]]]:
    """Return the header line of a CSV file, and the rows (lines) of each job."""
    header, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True) or [""]
    jobs: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        jobs.setdefault(tuple(line.split(",", len(JOB_COLUMNS))[:-1]), []).append(line)
    return header, jobs


def _check_complete(path: Path, rows: list[str], task: Task) -> None:
    column = len(JOB_COLUMNS)
    rounds = [row.split(",")[column] for row in rows]
    shorter = task.max_uploads is not None or task.max_seconds is not None
    enough = len(rows) == task.rounds or (shorter and rows)
    if not enough or rounds != [str(index) for index in range(len(rows))]:
        raise ConfigError(
            f"{path}: expected {task.rounds} rows of a finished job, numbered from 0, got "
            f"{len(rows)}; delete the file to compute its jobs again"
        )
