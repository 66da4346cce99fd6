# SPDX-License-Identifier: Apache-2.0
"""Run jobs in worker processes.

Every job runs in its own process with one torch thread. By default as many processes run at a time
as there are cores, or GPUs for jobs on GPUs.

Each worker has a pipe to the parent: it reports every round through it, and reads from it whether
to stop. If the parent dies, its end of the pipe is closed and the worker exits too. A job that
fails, or whose process is killed, does not affect the other jobs. On Ctrl-C (or SIGTERM) every
worker finishes its round, saves a checkpoint and exits; the same command resumes from there.
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
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import FrameType

import torch

from fastagg_sim.config import ConfigError
from fastagg_sim.devices import require_device
from fastagg_sim.job_folder import JobFolder
from fastagg_sim.progress import Progress
from fastagg_sim.simulation import Simulation

CHECKPOINT_SECONDS = 20.0


class Interrupted(Exception):
    """The run was stopped on request; the same command resumes it."""


@dataclass
class Outcome:
    """The outcome of a list of jobs.

    failures: the error text of each failed job, by the key of the job.
    reused: number of jobs that were already finished.
    """

    failures: dict[str, str] = field(default_factory=dict)
    reused: int = 0


def run_job(
    folder: JobFolder,
    on_round: Callable[[int, float | None], None],
    should_stop: Callable[[], bool],
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> bool:
    """Compute the job of `folder` in this process, starting from its checkpoint if there is one.

    on_round: called as `on_round(rounds done, accuracy)` after loading and after each round.
    should_stop: called after each round; if it returns True, a checkpoint is saved and the job
        stops.
    checkpoint_seconds: a checkpoint is saved after the first round that ends this long after the
        previous checkpoint.

    Returns whether the job is finished.
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
    """Entry point of a worker process.

    Sends ("round", rounds done, accuracy) for every round, then one of ("finished",), ("stopped",)
    and ("failed", error text). Any message from the parent means that the worker shall stop.

    gpu: the index of the GPU to use, or None.
    """
    # Ctrl-C also reaches the workers, as does the SIGTERM of timeout(1) or of a service manager.
    # Only the parent reacts, and tells them through the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
        return  # the parent has died
    except Exception:
        pipe.send(("failed", traceback.format_exc()))


@dataclass
class _Running:
    folder: JobFolder
    process: BaseProcess
    slot: int
    ended: bool = False


class _Pool:
    """The running worker processes and the queue of jobs that wait for one.

    `step` waits for messages from the workers and forwards them to the progress display.
    """

    def __init__(
        self,
        queue: Sequence[JobFolder],
        workers: int,
        gpus: int,
        checkpoint_seconds: float,
        progress: Progress,
    ) -> None:
        # A fork server that has already imported torch starts a worker in milliseconds. On
        # platforms without one, every worker imports torch itself.
        self._context: SpawnContext | ForkServerContext
        if "forkserver" in multiprocessing.get_all_start_methods():
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(["fastagg_sim.simulation"])
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
            with _signals_wait():
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
            self._fail(running.folder, f"the worker process was ended by {cause}\n")

    def _fail(self, folder: JobFolder, text: str) -> None:
        self.outcome.failures[folder.job.key] = text
        self._progress.ended(folder.job, "failed")

    def stop(self) -> None:
        """Ask every worker to save a checkpoint and exit, and wait until all have exited."""
        self._queue.clear()
        for pipe in self._running:
            with suppress(BrokenPipeError):  # this worker has just ended; step() will notice
                pipe.send("stop")
        while self._running:
            self.step()

    def terminate(self) -> None:
        for running in self._running.values():
            running.process.kill()  # they ignore SIGTERM


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Block SIGINT (Ctrl-C) and SIGTERM; this process gets those that come meanwhile at the end.

    Both also reach the fork server, which is started with the first worker and imports torch for
    some seconds. It would end with a traceback. A process that is started here keeps them blocked.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    # start() calls this, too. The first call unblocks both signals at its end, later ones do not.
    resource_tracker.ensure_running()
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def default_workers() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_settings(workers: int | None, checkpoint_seconds: float) -> None:
    """Raise ConfigError if there is no worker process, or if seconds are negative or NaN.

    A NaN is above nothing, so with it no checkpoint would be saved.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"workers: expected at least 1 worker process, got {workers}")
    if not checkpoint_seconds >= 0.0:
        raise ConfigError(
            f"checkpoint_seconds: expected seconds of at least 0, got {checkpoint_seconds}"
        )


def run_jobs(
    folders: Sequence[JobFolder],
    *,
    workers: int | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: Progress | None = None,
) -> Outcome:
    """Compute every job that is not finished yet.

    workers: number of worker processes; None for one per core, or one per GPU if there are jobs on
        GPUs. Jobs are spread evenly over the GPUs.
    checkpoint_seconds: seconds between two checkpoints of a job.
    progress: the display; by default a new one for the unfinished jobs.

    Raises ConfigError if `workers` is below 1, or the device of a job is not available. Raises
    Interrupted after Ctrl-C or SIGTERM, once all workers have saved a checkpoint; a second Ctrl-C
    ends them at once.
    """
    check_settings(workers, checkpoint_seconds)
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
            progress.message("stopping: waiting for every job to finish its round and save it")
            try:
                pool.stop()
            except KeyboardInterrupt:
                pool.terminate()
            raise Interrupted from None
        except BaseException:
            pool.terminate()
            raise
    return pool.outcome
