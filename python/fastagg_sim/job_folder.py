# SPDX-License-Identifier: Apache-2.0
"""The files of one job: configuration, CSV files, checkpoint, result."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import fastagg
from fastagg.durable import sync, sync_folder
from fastagg_sim.config import ConfigError, Job, job_from_dict, to_json
from fastagg_sim.files import naming, read_json, write_atomically
from fastagg_sim.simulation import RoundRecord, Simulation

JOB_COLUMNS = ("method", "rule", "dropout", "seed")
METRIC_COLUMNS = (
    "round",
    "uploads",
    "active",
    "accuracy",
    "loss",
    "wrong_friend_rate",
    "substitutions",
    "pairs",
)
DISTANCE_COLUMNS = ("round", "distance2_friends", "distance2_all")
MEMORY_COLUMNS = ("round", "peak_mb")
TIME_COLUMNS = ("time", "late", "age")
TIMING_COLUMNS = ("round", "seconds_training", "seconds_aggregation", "seconds_evaluation")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6f}" if isinstance(value, float) else str(value)


class _Rows:
    """An append-only CSV file with one row per round.

    Opening it truncates it to the first `keep_rounds` rounds, those that the checkpoint covers.
    """

    def __init__(self, path: Path, columns: Sequence[str], keep_rounds: int, prefix: str) -> None:
        self._columns = columns
        self._prefix = prefix
        self._path = path
        header = ",".join([*(JOB_COLUMNS if prefix else ()), *columns]) + "\n"
        lines = (
            path.read_text().splitlines(keepends=True)[1 : keep_rounds + 1] if keep_rounds else []
        )
        if len(lines) < keep_rounds or any(not line.endswith("\n") for line in lines):
            raise ConfigError(
                f"{path}: expected {keep_rounds} rows, because the checkpoint was saved after "
                f"{keep_rounds} rounds, but the file has fewer rows; delete {path.parent} to "
                "compute this job again"
            )
        write_atomically(path, header + "".join(lines))
        # Without a buffer: after an error nothing is left to be written by `close`.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (see close)

    def append(self, record: RoundRecord) -> None:
        cells = [_cell(getattr(record, name)) for name in self._columns]
        row = (self._prefix + ",".join(cells) + "\n").encode("utf-8")
        with naming(self._path):
            while row:  # a disk that becomes full takes a part, and refuses only the next write
                row = row[self._file.write(row) :]

    def sync(self) -> None:
        with naming(self._path):
            sync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class JobFolder:
    """The folder of one job. An unfinished job resumes from its newest checkpoint."""

    def __init__(self, path: Path, job: Job) -> None:
        self.path = path
        self.job = job
        self._files: list[_Rows] = []

    @property
    def finished(self) -> bool:
        return (self.path / "done.json").exists()

    @property
    def started(self) -> bool:
        """Whether the job is finished, or a run would go on from a checkpoint."""
        return self.finished or self._newest_checkpoint() is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The values of JOB_COLUMNS in every row of this job."""
        job = self.job
        return (job.method.label, job.method.rule, job.dropout.label, str(job.seed))

    def prepare(self) -> None:
        """Create the folder, or check that an existing one is of this job.

        Raises ConfigError if it belongs to another job, or if its job.json is damaged.
        """
        text = to_json(self.job)
        file = self.path / "job.json"
        if file.exists():
            content = read_json(file)
            try:
                # As a Job first: settings that are newer than the file get their defaults.
                before = to_json(job_from_dict(content))
            except ConfigError as error:
                raise ConfigError(f"{file}: {error}") from error
            check_same(json.loads(before), json.loads(text), file)
            return
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)

    def open(self, simulation: Simulation) -> None:
        """Restore `simulation` from the newest checkpoint, if there is one, and open the CSV
        files."""
        checkpoint = self._newest_checkpoint()
        if checkpoint is not None:
            simulation.load(checkpoint)
        job = self.job
        metrics = METRIC_COLUMNS + (("train_loss",) if job.task.train_loss else ())
        metrics += TIME_COLUMNS if job.task.latency is not None else ()
        files = {"metrics.csv": metrics, "timings.csv": TIMING_COLUMNS}
        if job.task.distances:
            files["distances.csv"] = DISTANCE_COLUMNS
        if job.task.memory:
            files["memory.csv"] = MEMORY_COLUMNS
        self._files = [
            _Rows(self.path / name, columns, simulation.next_round, ",".join(self.columns) + ",")
            for name, columns in files.items()
        ]

    def append(self, record: RoundRecord) -> None:
        for file in self._files:
            file.append(record)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []

    def checkpoint(self, simulation: Simulation) -> None:
        """Save a checkpoint of `simulation`.

        The CSV files are flushed to disk first, so that they always contain every round of the
        checkpoint. An older checkpoint is deleted when the new one is on the disk.
        """
        for file in self._files:
            file.sync()
        folder = self.path / "checkpoint"
        target = folder / f"round-{simulation.next_round:08d}"
        if target.exists():
            return
        temporary = folder / "tmp"
        if temporary.exists():
            with naming(temporary):
                shutil.rmtree(temporary)
        with naming(target):
            try:
                temporary.mkdir(parents=True)
                simulation.save(temporary)
                for written in temporary.iterdir():
                    _sync_file(written)
                sync_folder(temporary)
                old = [entry for entry in folder.iterdir() if entry != temporary]
                os.replace(temporary, target)
                sync_folder(folder)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        for entry in old:
            shutil.rmtree(entry, ignore_errors=True)  # the next checkpoint tries again

    def _newest_checkpoint(self) -> Path | None:
        found = sorted((self.path / "checkpoint").glob("round-*"))
        return found[-1] if found else None

    def finish(self, simulation: Simulation) -> None:
        """Write the score matrix, the norms and done.json, then delete the checkpoint."""
        if isinstance(simulation.aggregator, fastagg.FDMS):
            self._write_scores(simulation, simulation.aggregator)
        if simulation.norms:
            self._write_norms(simulation.norms)
        self.mark_done(simulation.next_round)
        shutil.rmtree(self.path / "checkpoint", ignore_errors=True)

    def mark_done(self, rounds: int) -> None:
        """Write done.json, which says that the files of the job are complete."""
        write_atomically(self.path / "done.json", json.dumps({"rounds": rounds}) + "\n")

    def _write_norms(self, norms: Mapping[int, Sequence[float]]) -> None:
        """Write norms.csv: one row per recorded round and client that sent an update."""
        lines = ["round,client,norm"]
        for round_index, values in norms.items():
            for client, value in enumerate(values):
                if not math.isnan(value):
                    lines.append(f"{round_index},{client},{value:.9g}")
        write_atomically(self.path / "norms.csv", "\n".join(lines) + "\n")

    def _write_scores(self, simulation: Simulation, aggregator: fastagg.FDMS) -> None:
        """Write scores.csv: per client k its group and the scores R[k, i].

        A cell is blank if no round scored the pair.
        """
        scores = aggregator.scores.tolist()  # [K, K]
        counts = aggregator.counts.tolist()  # [K, K]
        clients = range(len(scores))
        lines = [",".join(["client", "group", *(str(i) for i in clients)])]
        for k in clients:
            group = "" if simulation.groups is None else str(int(simulation.groups[k]))
            cells = [_cell(scores[k][i]) if counts[k][i] else "" for i in clients]
            lines.append(",".join([str(k), group, *cells]))
        write_atomically(self.path / "scores.csv", "\n".join(lines) + "\n")


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        sync(file.fileno())


def check_same(old: dict[str, object], new: dict[str, object], file: Path) -> None:
    """Raise ConfigError naming every setting that differs between `file` (old) and now (new)."""
    differing = sorted(_differences(old, new))
    if differing:
        raise ConfigError(
            f"{file}: the folder belongs to another configuration: {'; '.join(differing)}; "
            "choose another --out or --name, or delete the folder to start again"
        )


def _differences(old: object, new: object, at: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {*old, *new}:
            yield from _differences(old.get(key), new.get(key), f"{at}.{key}".lstrip("."))
    elif old != new:
        yield f"{at} was {old!r}, now {new!r}"
