# SPDX-License-Identifier: Apache-2.0
"""Show the progress of all jobs: live bars on a terminal, plain lines elsewhere.

Progress goes to standard error, so that standard output has results only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich import progress as rich_progress
from rich.console import Console

from fastagg_sim.config import Job

PLAIN_SECONDS = 15.0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


class Progress:
    """Display of the rounds done, summed over all jobs. Use it as a context manager.

    A plain line is printed every 15 seconds, and at the end: the share of the rounds done, jobs and
    rounds, rounds per second, time spent and left. Speed and remaining time are based on the rounds
    computed in this run only, not on those restored from checkpoints.
    """

    def __init__(self, jobs: Sequence[Job], console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total = sum(job.task.rounds for job in jobs)
        self._jobs = len(jobs)
        self._rounds: dict[int, int] = {}
        self._accuracy: dict[int, float] = {}
        self._ended = 0
        self._restored = 0
        self._start = time.monotonic()
        self._printed = self._start
        self._bars: rich_progress.Progress | None = None
        self._tasks: dict[int, rich_progress.TaskID] = {}

    def __enter__(self) -> Progress:
        if self._console.is_terminal and self._jobs:
            self._bars = rich_progress.Progress(
                rich_progress.TextColumn("{task.description}", markup=False),
                rich_progress.BarColumn(bar_width=16),
                rich_progress.MofNCompleteColumn(),
                rich_progress.TextColumn("{task.fields[note]}", markup=False),
                console=self._console,
                transient=True,
            )
            self._bars.start()
            self._all = self._bars.add_task("all jobs", total=self._total, note="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
        elif self._jobs and kind is None:
            self._print_plain()

    def message(self, text: str) -> None:
        # Where there is no terminal, a message is one line, however long.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def started(self, job: Job) -> None:
        if self._bars is not None:
            self._tasks[id(job)] = self._bars.add_task(
                job.key, total=job.task.rounds, note="loading"
            )

    def advanced(self, job: Job, done: int, accuracy: float | None) -> None:
        name = id(job)
        if name not in self._rounds:
            self._restored += done
        self._rounds[name] = done
        if accuracy is not None:
            self._accuracy[name] = accuracy
        if self._bars is not None and name in self._tasks:
            note = f"accuracy {self._accuracy[name]:.3f}" if name in self._accuracy else ""
            self._bars.update(self._tasks[name], completed=done, note=note)

    def ended(self, job: Job, how: str) -> None:
        """Report that a job ended. `how`: "finished", "stopped" or "failed"."""
        name = id(job)
        self._ended += 1
        if how == "finished":  # may have taken fewer rounds, see Task.max_uploads
            self._rounds[name] = job.task.rounds
        if self._bars is not None and name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))
        if how == "failed":
            self.message(f"failed: {job.key}")

    def refresh(self) -> None:
        """Redraw the bars, or print a line if the last one is old enough.

        The caller calls this about twice a second.
        """
        if self._bars is not None:
            self._bars.update(self._all, completed=self._done(), note=self._estimate())
        elif time.monotonic() - self._printed >= PLAIN_SECONDS:
            self._print_plain()

    def _done(self) -> int:
        return sum(self._rounds.values())

    def _estimate(self) -> str:
        elapsed = time.monotonic() - self._start
        computed = self._done() - self._restored
        if not computed:
            return f"{_duration(elapsed)} elapsed"
        left = elapsed / computed * (self._total - self._done())
        return (
            f"{computed / elapsed:.3g} rounds/s, {_duration(elapsed)} elapsed, "
            f"about {_duration(left)} left"
        )

    def _print_plain(self) -> None:
        self._printed = time.monotonic()
        share = 100 * self._done() / self._total
        self.message(
            f"{share:3.0f} %  {self._ended}/{self._jobs} jobs  "
            f"{self._done()}/{self._total} rounds  {self._estimate()}"
        )
