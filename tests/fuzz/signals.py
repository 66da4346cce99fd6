# SPDX-License-Identifier: Apache-2.0
"""Send signals at random times to a process that steps every rule; count what is not whole.

    make fuzz-signals ARGS="--signals 10000"

The handlers raise exceptions. After each of them, ``committed`` says whether the step has taken
effect. A twin that is never interrupted takes the same steps: parameters, state and report of both
must have the same bits. What must be 0: half-written steps, signals that were lost, steps that
neither returned a report nor raised, handlers that are not restored.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import Counter
from types import FrameType

import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator
from tests.rules.conftest import CONFIGURATIONS

K, D = 6, 500
NUMBERS = (signal.SIGINT, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
TIMERS = {
    signal.SIGALRM: signal.ITIMER_REAL,
    signal.SIGVTALRM: signal.ITIMER_VIRTUAL,
    signal.SIGPROF: signal.ITIMER_PROF,
}


class Arrived(BaseException):
    """Raised by the handlers."""


class Handler:
    """Counts signals and raises for each."""

    def __init__(self) -> None:
        self.raised = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.raised += 1
        raise Arrived(number)


def same(a: Tensor, b: Tensor) -> bool:
    return a.numpy().tobytes() == b.numpy().tobytes()


def whole(agg: Aggregator, twin: Aggregator, params: Tensor, expected: Tensor) -> bool:
    """Return whether parameters and state have the bits of the twin's."""
    state = twin.state_dict()
    return same(params, expected) and all(
        same(value, state[name]) for name, value in agg.state_dict().items()
    )


def disarm() -> None:
    """Stop all timers, whatever the handlers raise meanwhile."""
    raised: Arrived | None = None
    timers = list(TIMERS.values())
    while timers:
        try:
            signal.setitimer(timers[-1], 0.0)
            timers.pop()
        except Arrived as error:
            raised = error
    if raised is not None:
        raise raised


def attack(index: int, count: int, seed: int, found: Counter[str]) -> None:
    """Interrupt steps of one configuration until ``count`` signals have been raised."""
    name, options = CONFIGURATIONS[index % len(CONFIGURATIONS)]
    agg, twin = (fastagg.make(name, num_clients=K, num_params=D, **options) for _ in range(2))
    generator, draw = torch.Generator().manual_seed(seed), random.Random(f"{seed} {index}")
    params, expected = torch.zeros(D), torch.zeros(D)
    handler = Handler()
    before = {number: signal.signal(number, handler) for number in NUMBERS}
    gradients = torch.is_grad_enabled()
    longest = 1e-4
    updates, clients = torch.randn(3, D, generator=generator), [0, 2, 5]
    try:
        while handler.raised < count:
            committed, raised = agg.committed, handler.raised
            number = draw.choice(NUMBERS[1:])
            report, error, returned = None, None, False
            begin = time.perf_counter()
            try:
                try:
                    signal.setitimer(TIMERS[number], draw.random() * 1.5 * longest + 1e-6)
                    if draw.random() < 0.2:
                        signal.setitimer(signal.ITIMER_REAL, draw.random() * longest + 1e-6)
                    report = agg.step(params, updates, clients)
                    returned = True
                    longest = 0.9 * longest + 0.1 * (time.perf_counter() - begin)
                finally:
                    disarm()
            except Arrived as caught:
                error = caught
                disarm()
            done = agg.committed - committed
            if done not in (0, 1) or (returned and (report is None or done != 1)):
                found["ambiguous"] += 1
            if done == 1:
                told = twin.step(expected, updates, clients)
                last = agg.last_report
                if last is None or not same(last.weights, told.weights):
                    found["wrong report"] += 1
                if error is not None:
                    found["signals raised after the commit"] += 1
            elif error is not None:
                found["signals raised before the commit"] += 1
            if not whole(agg, twin, params, expected):
                found[f"half written: {name}"] += 1
                return
            if (handler.raised > raised) != (error is not None):
                found["lost"] += 1
            if any(signal.getsignal(number) is not handler for number in NUMBERS):
                found["handlers not restored"] += 1
                return
            found["steps"] += 1
            if done == 1:  # else the same round again
                clients = torch.randperm(K, generator=generator)[: draw.randrange(1, K)].tolist()
                updates = torch.randn(len(clients), D, generator=generator)
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        torch.set_grad_enabled(gradients)  # a handler may have interrupted torch.no_grad
    found["signals"] += handler.raised


def main(arguments: list[str] | None = None) -> int:
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("--signals", type=int, default=1000, help="signals in all")
    command.add_argument("--seed", type=int, default=0)
    options = command.parse_args(arguments)
    torch.set_num_threads(1)
    found = Counter[str]()
    for index in range(len(CONFIGURATIONS)):
        attack(index, -(-options.signals // len(CONFIGURATIONS)), options.seed, found)
    known = ("signals", "signals raised before the commit", "signals raised after the commit")
    print(f"{found.pop('steps')} steps of {len(CONFIGURATIONS)} configurations")
    for event in known:
        print(f"  {event}: {found.pop(event, 0)}")
    for event, times in sorted(found.items()):
        print(f"  {event}: {times}")
    for event in ("half written", "ambiguous", "lost"):
        if not any(what.startswith(event) for what in found):
            print(f"  {event}: 0")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
