# SPDX-License-Identifier: Apache-2.0
"""The files that jobs read: traces and lists of clients.

The settings of a job have the path of such a file. A results folder also keeps a digest of its
content in inputs.json, so that the results of one content are not taken for those of another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastagg_sim.client_process import ClientProcess
from fastagg_sim.config import ConfigError, Job
from fastagg_sim.dropout.base import PROCESSES
from fastagg_sim.files import read_json, write_atomically
from fastagg_sim.job_folder import check_same
from fastagg_sim.latency.base import LATENCIES

NAME = "inputs.json"
_DIGITS = 16  # of a digest


def input_files(job: Job) -> list[str]:
    """Return the paths of the files that `job` reads, as its settings have them."""
    dropout, latency = job.dropout, job.task.latency
    found = _files(PROCESSES, dropout.process, dropout.options_of(job.seed))
    if latency is not None:
        found += _files(LATENCIES, latency.process, latency.options)
    return found


def _files(
    table: Mapping[str, type[ClientProcess]], name: str, options: Mapping[str, Any]
) -> list[str]:
    # An unknown name is an error when the process is made.
    return list(table[name].files(options)) if name in table else []


def digests(jobs: Iterable[Job]) -> dict[str, str]:
    """Return the digest of the content of each file that `jobs` read, by its path.

    Raises ConfigError if a file cannot be read.
    """
    return {path: _digest(path) for path in sorted({p for job in jobs for p in input_files(job)})}


def _digest(path: str) -> str:
    found = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                found.update(piece)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return found.hexdigest()[:_DIGITS]


def read_digests(folder: Path) -> dict[str, str]:
    """Return the digests that the results folder `folder` keeps, by path.

    Results of earlier versions have none. Raises ConfigError if the file is damaged.
    """
    file = folder / NAME
    if not file.exists():
        return {}
    found = read_json(file)
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a digest by path, got {found!r}")
    return found


def check_digests(folder: Path, now: Mapping[str, str]) -> None:
    """Raise ConfigError if the results folder `folder` keeps another digest of a file in `now`."""
    before = {path: digest for path, digest in read_digests(folder).items() if path in now}
    check_same({"sha256": before}, {"sha256": {path: now[path] for path in before}}, folder / NAME)


def write_digests(folder: Path, now: Mapping[str, str]) -> None:
    """Add `now` to the digests that the results folder `folder` keeps; write nothing without
    files."""
    if now:
        merged = {**read_digests(folder), **now}
        write_atomically(folder / NAME, json.dumps(merged, indent=2, sort_keys=True) + "\n")


def same_content(job: Job, one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether no file of `job` has different digests in `one` and `other`."""
    both = (path for path in input_files(job) if path in one and path in other)
    return all(one[path] == other[path] for path in both)
