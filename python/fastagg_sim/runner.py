# SPDX-License-Identifier: Apache-2.0
"""Runs jobs in worker processes: one process per job, one torch thread per process, and as many
processes at a time as there are cores, or GPUs for jobs on them.

A worker tells the parent about every round through its own pipe, and reads from the same pipe
whether to stop; a parent that dies closes the pipe, so no worker outlives it. A job that fails,
even by being killed, fails alone. Ctrl-C (or SIGTERM) lets every worker finish its round, save a
checkpoint and leave; the same command then goes on from there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import FrameType

import torch

from fastagg_sim.devices import require_device
from fastagg_sim.job_folder import JobFolder
from fastagg_sim.progress import Progress
from fastagg_sim.simulation import Simulation

CHECKPOINT_SECONDS = 20.0


class Interrupted(Exception):
    """The run was stopped on request; it can be resumed by the same command."""


@dataclass
class Outcome:
    """What became of a list of jobs: names of failed jobs with their error text."""

    failures: dict[str, str] = field(default_factory=dict)
    reused: int = 0


def run_job(
    folder: JobFolder,
    on_round: Callable[[int, float | None], None],
    should_stop: Callable[[], bool],
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> bool:
    """Compute the job of `folder` in this process, from its checkpoint if there is one.

    `on_round(rounds done, accuracy)` is called after loading and after each round. A checkpoint is
    saved after the first round that ends `checkpoint_seconds` after the last one, and when
    `should_stop()` is true after a round. Returns whether the job is finished.
    """
    simulation = Simulation(folder.job)
    folder.open(simulation)
    try:
        on_round(simulation.rounds_done, None)
        saved = time.monotonic()
        while not simulation.done:
            record = simulation.run_round()
            folder.append(record)
            on_round(simulation.rounds_done, record.accuracy)
            stop = should_stop() and not simulation.done
            if stop or time.monotonic() - saved >= checkpoint_seconds:
                folder.checkpoint(simulation)
                saved = time.monotonic()
            if stop:
                return False
    finally:
        folder.close()
    folder.finish(simulation)
    return True


def _worker(
    folder: JobFolder, pipe: Connection, checkpoint_seconds: float, gpu: int | None
) -> None:
    """Process entry: sends ("round", n, accuracy)*, then ("finished",), ("stopped",) or
    ("failed", text). `gpu`: the number of the one to compute on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides and tells through the pipe
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    try:
        if gpu is not None:
            torch.cuda.set_device(gpu)
        finished = run_job(
            folder,
            lambda done, accuracy: pipe.send(("round", done, accuracy)),
            pipe.poll,
            checkpoint_seconds,
        )
        pipe.send(("finished",) if finished else ("stopped",))
    except BrokenPipeError:
        return  # the parent is gone
    except Exception:
        pipe.send(("failed", traceback.format_exc()))


@dataclass
class _Running:
    folder: JobFolder
    process: BaseProcess
    slot: int
    ended: bool = False


class _Pool:
    """The processes now at work; `step` waits for news and reports it to the progress display."""

    def __init__(
        self,
        queue: Sequence[JobFolder],
        workers: int,
        gpus: int,
        checkpoint_seconds: float,
        progress: Progress,
    ) -> None:
        # A server forked once with torch imported starts a worker in milliseconds; where there is
        # none, every worker imports torch for itself.
        self._context: SpawnContext | ForkServerContext
        if "forkserver" in multiprocessing.get_all_start_methods():
            self._context = multiprocessing.get_context("forkserver")
            # The second is what the data set digits needs, and takes most of a second to import.
            self._context.set_forkserver_preload(["fastagg_sim.simulation", "sklearn.datasets"])
        else:
            self._context = multiprocessing.get_context("spawn")
        self._queue = list(queue)
        self._workers = workers
        self._gpus = gpus
        self._checkpoint_seconds = checkpoint_seconds
        self._progress = progress
        self._running: dict[Connection, _Running] = {}
        self.outcome = Outcome()

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._running)

    def start_waiting_jobs(self) -> None:
        while self._queue and len(self._running) < self._workers:
            folder = self._queue.pop(0)
            slot = min({*range(self._workers)} - {one.slot for one in self._running.values()})
            gpu = slot % self._gpus if folder.job.task.device == "cuda" else None
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_worker, args=(folder, theirs, self._checkpoint_seconds, gpu), daemon=True
            )
            process.start()
            theirs.close()
            self._running[ours] = _Running(folder, process, slot)
            self._progress.started(folder.job)

    def step(self, timeout: float = 0.5) -> None:
        for pipe in wait(list(self._running), timeout):
            assert isinstance(pipe, Connection)
            self._receive(pipe)
        self._progress.refresh()

    def _receive(self, pipe: Connection) -> None:
        running = self._running[pipe]
        job = running.folder.job
        try:
            kind, *content = pipe.recv()
        except (EOFError, ConnectionResetError):
            self._close(pipe)
            return
        if kind == "round":
            self._progress.advanced(job, *content)
            return
        running.ended = True
        if kind == "failed":
            self._fail(running.folder, content[0])
        else:
            self._progress.ended(job, kind)

    def _close(self, pipe: Connection) -> None:
        running = self._running.pop(pipe)
        pipe.close()
        running.process.join()
        if not running.ended:
            code = running.process.exitcode
            cause = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            self._fail(running.folder, f"the worker process ended by {cause}\n")

    def _fail(self, folder: JobFolder, text: str) -> None:
        self.outcome.failures[folder.job.key] = text
        self._progress.ended(folder.job, "failed")

    def stop(self) -> None:
        """Ask every worker to save and leave, and wait for it."""
        self._queue.clear()
        for pipe in self._running:
            with suppress(BrokenPipeError):  # it has just ended; step() hears of it
                pipe.send("stop")
        while self._running:
            self.step()

    def terminate(self) -> None:
        for running in self._running.values():
            running.process.terminate()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def default_workers() -> int:
    """Number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_jobs(
    folders: Sequence[JobFolder],
    *,
    workers: int | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: Progress | None = None,
) -> Outcome:
    """Compute every job that is not finished yet.

    workers: how many at a time; None: one per core, or one per GPU where jobs are on GPUs, over
        which they are spread evenly.

    Raises ConfigError if the device of a job is not there. Raises Interrupted after Ctrl-C or
    SIGTERM, when all workers have saved their state; a second Ctrl-C ends them at once.
    """
    waiting = [folder for folder in folders if not folder.finished]
    for device in {folder.job.task.device for folder in waiting}:
        require_device(device)
    on_gpus = any(folder.job.task.device == "cuda" for folder in waiting)
    gpus = torch.cuda.device_count() if on_gpus else 0
    progress = progress or Progress([folder.job for folder in waiting])
    pool = _Pool(waiting, workers or gpus or default_workers(), gpus, checkpoint_seconds, progress)
    pool.outcome.reused = len(folders) - len(waiting)
    with progress, _sigterm_as_interrupt():
        try:
            while pool.busy:
                pool.start_waiting_jobs()
                pool.step()
        except KeyboardInterrupt:
            progress.message("stopping: every job finishes its round and saves a checkpoint")
            try:
                pool.stop()
            except KeyboardInterrupt:
                pool.terminate()
            raise Interrupted from None
        except BaseException:
            pool.terminate()
            raise
    return pool.outcome
