# SPDX-License-Identifier: Apache-2.0
"""Use one aggregator of each rule in many threads, and save it at the same time.

    make fuzz-threads ARGS="--steps 48000 --saves 290"

Each thread has its own parameters. Counts what must be 0: steps after which parameters are not
finite, rows of a checkpoint that are not of one step, files that do not load, exceptions.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import fastagg
from tests.rules.conftest import CONFIGURATIONS

K, D, THREADS = 6, 2000, 8


def run(index: int, steps: int, saves: int, folder: Path, found: Counter[str]) -> None:
    """Step one aggregator ``steps`` times from all threads; save and load it ``saves`` times."""
    name, options = CONFIGURATIONS[index]
    agg = fastagg.make(name, num_clients=K, num_params=D, **options)
    path, lock = folder / "shared", threading.Lock()

    def note(event: str, times: int = 1) -> None:
        with lock:
            found[event] += times

    def train(seed: int) -> None:
        generator, params = torch.Generator().manual_seed(seed), torch.zeros(D)
        for _ in range(steps // THREADS):
            ids = torch.randperm(K, generator=generator)[:4]
            # All numbers of a row are equal, so a torn memory row shows.
            updates = torch.randn(4, 1, generator=generator).expand(4, D).contiguous()
            try:
                agg.step(params, updates, ids)
            except ValueError as error:
                note(f"{name}: {str(error)[:60]}")
            note("steps")
            if not bool(torch.isfinite(params).all()):
                note("not finite")
                params.zero_()

    def save() -> None:
        for _ in range(saves):
            agg.save(path)
            note("saves")
            try:
                state = fastagg.load(path).state_dict()
            except ValueError as error:
                note(f"not loaded: {error}")
                continue
            for key, value in state.items():
                rows = key in ("memory", "total", "previous", "corrections", "controls")
                if rows and bool((value != value[..., :1]).any()):
                    note(f"torn {key}")

    with ThreadPoolExecutor(THREADS + 1) as pool:
        work = [pool.submit(train, seed) for seed in range(THREADS)]
        work.append(pool.submit(save))
        for future in work:
            future.result()


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("--steps", type=int, default=4800, help="steps in all")
    command.add_argument("--saves", type=int, default=54, help="saves in all")
    return command


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    found = Counter[str]()
    each = [-(-count // len(CONFIGURATIONS)) for count in (options.steps, options.saves)]
    with tempfile.TemporaryDirectory() as name:
        for index in range(len(CONFIGURATIONS)):
            run(index, -(-each[0] // THREADS) * THREADS, each[1], Path(name), found)
    print(f"{found.pop('steps')} steps in {THREADS} threads, {found.pop('saves')} saves")
    for event, times in sorted(found.items()):
        print(f"  {event}: {times}")
    print("nothing went wrong" if not found else f"{found.total()} went wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
