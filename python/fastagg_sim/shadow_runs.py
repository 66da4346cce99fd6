# SPDX-License-Identifier: Apache-2.0
"""The two shadow runs of Su et al., section 6.1, which choose the clients to silence.

Both are ordinary jobs: they run in parallel and are resumed after an interruption. Their results
are stored in a cache folder and used by all runs with the same settings. The adversary uses one
norm per client from each of two rounds (`Task.norm_rounds`).
"""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from fastagg_sim.config import Config, ConfigError, Dropout, LocalTraining, Method, Task
from fastagg_sim.data import cache_dir
from fastagg_sim.devices import on_device
from fastagg_sim.dropout.shadow import Candidates, choose_candidates
from fastagg_sim.job_folder import JobFolder
from fastagg_sim.progress import Progress
from fastagg_sim.report import JobsFailed, check
from fastagg_sim.runner import Interrupted, run_jobs

# In seconds. A round of 100 clients on CIFAR-10 takes about 20 seconds.
_CHECKPOINT_SECONDS = 60.0


@dataclass(frozen=True)
class Shadow:
    """The settings, except the seed, that determine which clients the adversary may silence.

    task: the task of the real run, with the local training of its FedAvg. To draw new data from the
        same distributions, set the option `redraw` of the partition or the data set. The number of
        rounds and the evaluation are replaced.
    momentum: local training of the second run, whose clients send their momentum; it must have
        local_steps=1 and keep_momentum.
    clipping: options of the rule centered-clip in the second run.
    sample_weights: see `Method.sample_weights`.
    seed_shift: added to the seed. With any value but 0 the distributions of the clients also differ
        from those of the real run, as in the released code.

    For the other fields see `choose_candidates`.
    """

    task: Task
    momentum: LocalTraining
    clipping: dict[str, float]
    sample_weights: bool = False
    seed_shift: int = 0
    first_round: int = 5
    last_round: int = 150
    num_fedavg: int = 25
    num_clipping: int = 10
    absolute: bool = True

    def __post_init__(self) -> None:
        if not (self.momentum.keep_momentum and self.momentum.local_steps == 1):
            raise ConfigError(
                "momentum: expected one local step with keep_momentum, got "
                f"local_steps={self.momentum.local_steps}, "
                f"keep_momentum={self.momentum.keep_momentum}"
            )

    def config(self, seeds: Sequence[int]) -> Config:
        """Return the configuration of the two runs for `seeds`; `seed_shift` is added here."""
        task = dataclasses.replace(
            self.task,
            rounds=self.last_round + 1,
            eval_every=self.last_round + 1,
            train_loss=0,
            norm_rounds=(self.first_round, self.last_round),
        )
        config = Config(
            name="shadow",
            task=task,
            # In gradient units an update is minus the sum of the gradients (first run) or minus the
            # momentum (second run).
            methods=(
                self._method("fedavg", "fedavg", {}, None),
                self._method("clipping", "centered-clip", dict(self.clipping), self.momentum),
            ),
            dropouts=(Dropout(),),
            seeds=tuple(seed + self.seed_shift for seed in seeds),
        )
        return on_device(config, task.device)

    def _method(
        self, label: str, rule: str, options: dict[str, float], training: LocalTraining | None
    ) -> Method:
        return Method(
            label,
            rule,
            options,
            full_participation=True,
            gradient_units=True,
            training=training,
            sample_weights=self.sample_weights,
        )

    def folder(self, root: Path | None = None) -> Path:
        """Return the folder of the runs; its name is a hash of all settings of the norms.

        root: the cache folder (default: that of the data sets).
        """
        config = dataclasses.asdict(self.config([0]))
        # Earlier versions had no `device` and no `memory`; without these, their folders are found
        # again.
        if self.task.device == "cpu":
            del config["task"]["device"]
        if not self.task.memory:
            del config["task"]["memory"]
        digest = hashlib.blake2b(json.dumps(config).encode(), digest_size=8).hexdigest()
        return (cache_dir() if root is None else root) / "shadow" / digest

    def candidates(
        self,
        seeds: Sequence[int],
        *,
        root: Path | None = None,
        workers: int | None = None,
        console: Console | None = None,
    ) -> dict[int, Candidates]:
        """Return the clients that the adversary may silence, by seed.

        Computes the shadow runs that are not in the cache yet. If another process is computing
        them, prints a message and waits for it.

        root: the cache folder (default: that of the data sets).
        workers: as for `run_jobs`.

        Raises ConfigError or DataError before any run starts, JobsFailed if a run fails, and
        Interrupted as `run_jobs` does; the next call then resumes the runs.
        """
        console = console or Console(stderr=True)
        folder = self.folder(root)
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config(seeds)
        check(config)
        jobs = [JobFolder(folder / job.key, job) for job in config.jobs()]
        with _locked(folder / "lock", console):
            for job in jobs:
                job.prepare()
            waiting = [job for job in jobs if not job.finished]
            if waiting:
                console.print(f"shadow runs in {folder}", highlight=False, soft_wrap=True)
            outcome = run_jobs(
                jobs,
                workers=workers,
                checkpoint_seconds=_CHECKPOINT_SECONDS,
                progress=Progress([job.job for job in waiting], console),
            )
        if outcome.failures:
            texts = (f"shadow run {key}: {text}" for key, text in outcome.failures.items())
            raise JobsFailed("\n".join(texts))
        norms = {(job.job.method.label, job.job.seed): self._norms(job) for job in jobs}
        return {
            seed: choose_candidates(
                norms["fedavg", seed + self.seed_shift],
                norms["clipping", seed + self.seed_shift],
                first_round=0,
                last_round=1,
                num_fedavg=self.num_fedavg,
                num_clipping=self.num_clipping,
                absolute=self.absolute,
            )
            for seed in seeds
        }

    def _norms(self, job: JobFolder) -> torch.Tensor:
        """Return the norms of the first and the last round, float64 [2, K]."""
        norms = torch.full((2, self.task.num_clients), torch.nan, dtype=torch.float64)
        with open(job.path / "norms.csv", newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                at = (self.first_round, self.last_round).index(int(row["round"]))
                norms[at, int(row["client"])] = float(row["norm"])
        return norms


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; print a message if it has to wait."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"waiting for the process that holds the lock {path}", soft_wrap=True)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except KeyboardInterrupt:
                raise Interrupted from None
        yield
