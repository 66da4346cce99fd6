# SPDX-License-Identifier: Apache-2.0
"""A process that runs the cases of ``benchmarks.cuda``, so that a case cannot end the others.

A CUDA error makes a process useless for the GPU, and a call that never returns cannot be
interrupted from within. The worker is then ended, and the next case gets a new one.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class CaseError(Exception):
    """A case raised an error, ran too long, or ended its process."""


class Worker:
    """Calls a function in another process, which is started when needed and kept.

    Args:
        function: a function of a module. Its arguments and its result must be picklable.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._process: Any = None
        self._pipe: Connection | None = None

    def call(self, *arguments: Any, seconds: float) -> Any:
        """Return the function's result.

        Args:
            arguments: of the function.
            seconds: how long to wait, the start of the process included.

        Raises:
            CaseError: with the reason. After an error of CUDA, a crash or too long a wait, the next
                call starts a new process.
        """
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(arguments)
            if not self._pipe.poll(seconds):
                raise CaseError(f"ended after {seconds:.0f} s")
            result, error, usable = self._pipe.recv()
        except CaseError:
            self.close()
            raise
        except (EOFError, OSError):
            self._process.join(1)
            code = self._process.exitcode
            self.close()
            raise CaseError(f"the process ended with status {code}") from None
        if not usable:
            self.close()
        if error:
            raise CaseError(error)
        return result

    def close(self) -> None:
        """End the process."""
        if self._pipe is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
        self._pipe = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.function), daemon=True)
        self._process.start()
        theirs.close()


def _serve(pipe: Connection, function: Callable[..., Any]) -> None:
    """Answer calls with (result, error, whether this process can go on), until the pipe closes."""
    while True:
        try:
            arguments = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            answer = function(*arguments), "", True
        except Exception:
            answer = None, traceback.format_exc(), _gpu_works()
        pipe.send(answer)


def _gpu_works() -> bool:
    import torch

    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception:
        return False
    return True
