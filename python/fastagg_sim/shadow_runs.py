# SPDX-License-Identifier: Apache-2.0
"""The two shadow runs of Su et al., section 6.1, kept on disk and shared by all who need them.

Both are ordinary jobs: resumed where they were interrupted, run in parallel, and repeated by nobody
as long as their files are there. What the adversary takes from them is one norm per client in each
of two rounds (`Task.norm_rounds`).
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

# In seconds; a shadow round of 100 clients on CIFAR-10 takes about 20 seconds.
_CHECKPOINT_SECONDS = 60.0


@dataclass(frozen=True)
class Shadow:
    """What decides whom the adversary would silence, but for the seed.

    task: the real run's task, with local training of its FedAvg; data that are drawn afresh
        (`redraw`) are for the caller to ask for. Rounds and evaluation are set here.
    momentum: local training of the clients whose momentum is looked at: one step, momentum kept.
    clipping: options of the rule centered-clip in the second run.
    sample_weights: clients weigh as much as they have samples.
    seed_shift: added to the seed. Anything but 0 makes the clients' distributions other ones, too,
        as in the released code.

    The others are those of `choose_candidates`.
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
        """The two runs for each of `seeds`, which get the shift here."""
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
            # In gradient units an update is minus the sum of the gradients, or minus the momentum.
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
        """Where the runs are kept: a folder named by all that the norms depend on.

        root: the cache folder (default: that of the data sets).
        """
        config = dataclasses.asdict(self.config([0]))
        if self.task.device == "cpu":  # folders are older than the setting
            del config["task"]["device"]
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
        """Whom the adversary would silence, for each of `seeds`; runs what is not there yet.

        Another process that wants the same runs waits for this one, and says so. Raises
        Interrupted as `run_jobs` does; the next call then goes on. Raises ConfigError or DataError
        before anything runs, JobsFailed if a run fails.
        """
        console = console or Console()
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
        """[2, K] float64: the norms of the first and the last round."""
        norms = torch.full((2, self.task.num_clients), torch.nan, dtype=torch.float64)
        with open(job.path / "norms.csv", newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                at = (self.first_round, self.last_round).index(int(row["round"]))
                norms[at, int(row["client"])] = float(row["norm"])
        return norms


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"waiting for the process that holds {path}", soft_wrap=True)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except KeyboardInterrupt:
                raise Interrupted from None
        yield
