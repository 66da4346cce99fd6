# SPDX-License-Identifier: Apache-2.0
"""The lock that calls of one aggregator take in turn, and what a fork does to it."""

from __future__ import annotations

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
    _all: ClassVar[weakref.WeakSet[CallLock]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._torn = False  # whether a thread that does not exist here was within a call
        CallLock._all.add(self)

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
        locks = list(cls._all)
        cls.forked = cls.forked or bool(locks)
        for lock in locks:
            if lock.acquire(blocking=False):
                lock.release()
            else:
                lock._torn = True
                lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CallLock._after_fork)
