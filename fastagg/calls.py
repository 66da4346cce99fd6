# SPDX-License-Identifier: Apache-2.0
"""The lock that calls of one aggregator take in turn, and what a fork does to it."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from typing import ClassVar

import torch


class CallLock(type(threading.RLock())):  # type: ignore[misc]
    """A reentrant lock. In a process that was forked, it refuses calls that could hang or be wrong.

    A forked process has one thread. Torch's operators may wait there for threads that existed in
    the process before, and what another thread was changing at the moment of the fork stays
    incomplete.
    """

    forked: ClassVar[bool] = False
    """Whether this process was forked after an aggregator had been made."""
    # No WeakSet: it runs Python code when a lock is collected. An exception that the handler of a
    # signal raises there, as for Ctrl-C, is ignored by Python, and the signal is lost.
    _all: ClassVar[dict[int, weakref.ref[CallLock]]] = {}
    _numbers: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self) -> None:
        self._torn = False  # whether a thread that does not exist here was within a call
        for number, lock in list(CallLock._all.items()):
            if lock() is None:
                CallLock._all.pop(number, None)
        CallLock._all[next(CallLock._numbers)] = weakref.ref(self)

    def checked(self, call: str) -> CallLock:
        """Return the lock, for the call of this name.

        Raises:
            RuntimeError: this process was forked, and the call could hang or use a torn state.
        """
        if not CallLock.forked:
            return self
        if self._torn:
            raise RuntimeError(
                f"{call}: this process was forked while another thread was in a call of this "
                "aggregator, so its state may be incomplete here; load it from a checkpoint"
            )
        if torch.get_num_threads() > 1:
            raise RuntimeError(
                f"{call}: this process was forked after an aggregator had been made, and torch may "
                "wait for threads that do not exist here; call torch.set_num_threads(1) first, or "
                'start the process with the method "spawn" or "forkserver" of multiprocessing'
            )
        return self

    @classmethod
    def _after_fork(cls) -> None:
        locks = [lock for ref in list(cls._all.values()) if (lock := ref()) is not None]
        cls.forked = cls.forked or bool(locks)
        for lock in locks:
            if lock.acquire(blocking=False):
                lock.release()
            else:
                lock._torn = True
                lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CallLock._after_fork)
