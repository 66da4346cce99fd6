# SPDX-License-Identifier: Apache-2.0
"""Damage, cut and forge checkpoints and client files; count what is refused and what is not.

    make fuzz-files ARGS="--flips 10000 --crafted 200 --cuts 200"

Every draw follows from the seed. A forged file has a correct checksum: only the checks of sizes,
options and state stand against it. One that is accepted must not let a step crash, hang, change
anything when it raises, or make parameters infinite. The command fails if a count that must be 0
is not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import fastagg
from fastagg import Aggregator, CheckpointError, ClientFiles, FlatLayout, checkpoint, tensor_file
from fastagg.distributed import storage
from tests.rules.conftest import CONFIGURATIONS

K, D = 6, 23
ROUNDS = 6
LONGEST = 20  # seconds of the processor for a load and three steps; a longer one counts as a hang
NEVER = 20 * LONGEST  # seconds after which one that waits counts as a hang


class Hang(BaseException):
    """Raised by the alarm if a load or step does not return."""


def sample(index: int) -> tuple[Aggregator, Tensor]:
    """Return an aggregator of a configuration after a few rounds, and the parameters."""
    name, options = CONFIGURATIONS[index % len(CONFIGURATIONS)]
    agg = fastagg.make(name, num_clients=K, num_params=D, **options)
    generator, params = torch.Generator().manual_seed(index), torch.zeros(D)
    for _ in range(ROUNDS):
        clients = torch.randperm(K, generator=generator)[:3]
        ages = None if agg.staleness is None else (clients % 3).clamp(max=agg.committed)
        agg.step(params, torch.randn(3, D, generator=generator), clients, ages=ages)
    return agg, params


def written(index: int, path: Path) -> bytes:
    agg, params = sample(index)
    agg.save(path, params=params)
    return path.read_bytes()


def attempt(path: Path, then: Callable[[Aggregator], object] = id) -> str:
    """Load a file; return "refused", "accepted", or what went wrong."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, _alarm)
    signal.setitimer(signal.ITIMER_PROF, LONGEST)
    signal.alarm(NEVER)
    params = torch.full((D,), 7.0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            agg = fastagg.load(path, params=params)
        then(agg)
    except CheckpointError as error:
        unchanged = bool((params == 7.0).all())
        return "refused" if unchanged and str(error).startswith(str(path)) else f"bad {error!r}"
    except Hang:
        return "hang"
    except Exception as error:
        return f"wrong {type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    return "accepted"


def _alarm(*_: object) -> None:
    raise Hang


def flips(count: int, seed: int, folder: Path) -> Counter[str]:
    """Flip one random bit of a file."""
    draw, path, found = random.Random(f"flips {seed}"), folder / "flipped", Counter[str]()
    contents = [written(index, path) for index in range(len(CONFIGURATIONS))]
    for number in range(count):
        content = bytearray(contents[number % len(contents)])
        place = draw.randrange(len(content))
        content[place] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        found[attempt(path)] += 1
    return found


def truncations(files: int, folder: Path) -> Counter[str]:
    """Truncate files at every byte."""
    path, found = folder / "truncated", Counter[str]()
    for index in range(min(files, len(CONFIGURATIONS))):
        content = written(index, path)
        for length in range(len(content)):
            path.write_bytes(content[:length])
            found[attempt(path)] += 1
    return found


# --- forged files -----------------------------------------------------------------------------

HOSTILE: list[Any] = [
    *(None, True, False, -1, 0, 1, 5, 7, 2**15, 2**31, 2**31 - 1, 2**62, 2**63 - 1, 2**63, 10**30),
    *(0.5, -0.5, 1e-40, 5e-324, 1e30, 3.4e38, 1e300, -1e300, 1.0000001),
    *("", "inf", "nan", "x" * 5000, "../..", "drop", "client", "distance", "theorem2", "bfloat16"),
    *([], [1], [[[1]]], {}, {"kind": "Theorem2Threshold"}, {"kind": []}, {"tau": -1}),
    {"kind": "ReleasedThreshold", "factor": 1e300},
    {"kind": "ReleasedThreshold", "factor": "a"},
    {
        "kind": "Theorem2Threshold",
        "num_clients": 6,
        "rounds": 10**400,
        "beta": 5e-324,
        "p": 1e-300,
        "b_max": 3,
        "delta_f": 0.0,
    },
    {"rule": "nnm", "rule_options": {"rule": "nnm", "rule_options": {"rule": "krum"}}},
]
FLOATS = [math.nan, math.inf, -math.inf, 1e300, -1e300, 3.4e38, -3.4e38, 1e-45, -1.0, 2.0, 0.0]
INTS = [-1, 0, 1, 2, 127, 255, 32767, -32768, 2**31 - 1, 2**62, 2**63 - 1, -(2**63)]


def poison(tensor: Tensor, draw: random.Random) -> Tensor:
    """Return a copy of a tensor with hostile numbers."""
    bad, kind = tensor.clone(), draw.randrange(4)
    flat = bad.view(-1)
    if not flat.numel():
        return bad
    if kind == 0:  # any bits
        raw = flat.view(torch.uint8)
        raw.copy_(torch.tensor([draw.randrange(256) for _ in range(len(raw))], dtype=torch.uint8))
        return bad
    places = range(len(flat)) if kind == 1 else [draw.randrange(len(flat))]
    values = FLOATS if bad.dtype.is_floating_point else INTS
    value = draw.choice(values)
    if not bad.dtype.is_floating_point and bad.dtype != torch.bool:
        info = torch.iinfo(bad.dtype)
        value = min(max(value, info.min), info.max)
    if kind == 3:
        return bad.flip(0) if bad.ndim else bad
    number = torch.tensor(value, dtype=torch.float64 if bad.is_floating_point() else torch.int64)
    for place in places:
        flat[place] = number.to(bad.dtype)
    return bad


def forge(agg: Aggregator, params: Tensor, draw: random.Random, path: Path) -> None:
    """Write a file with a correct checksum and hostile content."""
    rule, options, state = agg.name, agg.options(), dict(agg.state_dict())
    model: Tensor | None = params
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        kind = draw.randrange(8)
        if kind <= 2 and state:
            name = draw.choice(sorted(state))
            state[name] = poison(state[name], draw)
        elif kind == 3:
            options[draw.choice(sorted(options))] = draw.choice(HOSTILE)
        elif kind == 4:
            name = draw.choice(["memory_folder", "device", "elimination", "reuse", "x", "self"])
            options[name] = draw.choice(HOSTILE)
        elif kind == 5 and state:
            name = draw.choice(sorted(state))
            change = draw.choice(["drop", "short", "dtype", "wide", "empty"])
            old = state.pop(name)
            if change == "short":
                state[name] = old[:-1].clone() if old.ndim else old.view(1)
            elif change == "dtype":
                state[name] = old.to(torch.float64 if old.dtype != torch.float64 else torch.int64)
            elif change == "wide":
                state[name] = torch.zeros(*old.shape, 2, dtype=old.dtype)
            elif change == "empty":
                state[name] = torch.zeros(0, 2**20, dtype=old.dtype)
        elif kind == 6:
            rule = draw.choice([*fastagg.available(), "nothing", ""])
        else:
            model = poison(params, draw)
    checkpoint.write(path, rule, options, state, params=model)
    if draw.random() < 0.25:
        path.write_bytes(bend(path.read_bytes(), draw))


def bend(content: bytes, draw: random.Random) -> bytes:
    """Damage the structure of a header, and correct the checksum."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = draw.choice([key for key in header if key != "__metadata__"])
    entry, kind = header[name], draw.randrange(8)
    if kind == 0:
        entry["shape"] = draw.choice(
            [[2**31, 2**31], [-1], [2**62, 4], [0, 2**40], ["a"], 3, [1.5]]
        )
    elif kind == 1:
        entry["data_offsets"] = draw.choice([[0, 2**62], [-8, 0], [8, 0], [0], ["0", "8"], None])
    elif kind == 2:
        entry["dtype"] = draw.choice(["F32", "I64", "BOOL", "F8", "", None, ["F32"], "C64"])
    elif kind == 3:
        header["__metadata__"][draw.choice(["options", "rule", "version", "more"])] = draw.choice(
            ["{", "[" * 50_000, '{"a": NaN}', '{"a": 1, "a": 2}', "9" * 5000, "2", "null", '"x"']
        )
    elif kind == 4:
        header[draw.choice(["state.more", "more", "params", "option.num_clients"])] = entry
    elif kind == 5 and draw.random() < 0.5:
        data += b"\0" * draw.randrange(1, 9)
    elif kind == 5:
        shape = draw.choice([[0, 2**48, 2**48], [2**40, 2**40, 0], [2**48, 0], [0] * 33])
        empty = {"dtype": draw.choice(["F32", "BF16"]), "shape": shape}
        header["state.more"] = empty | {"data_offsets": [len(data)] * 2}
    elif kind == 6:
        entry[draw.choice(["more", "shape"])] = {}
    else:
        others = [header[key] for key in header if key != "__metadata__"]
        entry["data_offsets"] = draw.choice(others)["data_offsets"]
    text = json.dumps(header).encode()
    stated = re.search(rb'"sha256": "([0-9a-f]{64})"', text)
    assert stated is not None
    whole = len(text).to_bytes(8, "little") + text.replace(stated[1], b"0" * 64)
    digest = hashlib.sha256(whole + data).hexdigest().encode()
    return whole.replace(b'"sha256": "' + b"0" * 64, b'"sha256": "' + digest) + data


def use(agg: Aggregator) -> None:
    """Run rounds with an aggregator from a forged file; raise AssertionError if one goes wrong."""
    generator, params = torch.Generator().manual_seed(1), torch.zeros(agg.num_params)
    for size in (3, 0, agg.num_clients):
        clients = torch.randperm(agg.num_clients, generator=generator)[:size]
        updates = torch.randn(len(clients), agg.num_params, generator=generator)
        before, state = params.clone(), agg.state_dict()
        ages = None if agg.staleness is None else clients % 2
        try:
            agg.step(params, updates, clients, ages=ages)
        except ValueError:
            assert torch.equal(params, before), "a step that raised changed parameters"
            for name, value in agg.state_dict().items():
                assert torch.equal(value, state[name]), f"a step that raised changed {name}"
        assert torch.isfinite(params).all(), "parameters are not finite"
        assert all(torch.isfinite(value).all() for value in agg.state_dict().values()), (
            "the state is not finite"
        )


def crafted(count: int, seed: int, folder: Path) -> Counter[str]:
    """Forge ``count`` files of each configuration, and use those that are accepted."""
    path, found = folder / "forged", Counter[str]()
    for index in range(len(CONFIGURATIONS)):
        agg, params = sample(index)
        draw = random.Random(f"crafted {seed} {index}")
        for _ in range(count):
            forge(agg, params, draw, path)
            result = attempt(path, use)
            if result not in ("refused", "accepted"):
                result = f"{agg.name}: {result}"
            found[result] += 1
    return found


# --- files that are cut while they are read ---------------------------------------------------


def cuts(count: int, seed: int, folder: Path) -> Counter[str]:
    """Truncate files at random moments while each kind of reader reads them.

    A mapping would end the process by a signal.
    """
    draw, found, width = random.Random(f"cuts {seed}"), Counter[str](), 1 << 18
    layout = FlatLayout.from_state_dict({"w": torch.zeros(width)})
    agg = fastagg.make("mifa", num_clients=4, num_params=width)
    agg.step(torch.zeros(width), torch.randn(4, width), range(4))
    server = fastagg.make("fedavg", num_clients=4, num_params=width)
    path, params = folder / "cut", torch.zeros(width)
    manifest = storage.Manifest(
        "mifa", width, width, [(0, width)], "0" * 16, ["memory", "total"], [], {}
    )
    shard = folder / manifest.file(0)
    readers: list[tuple[Path, Callable[[], object], Callable[[], object]]] = [
        (
            path,
            lambda: save_file({"w": torch.randn(width)}, path),
            lambda: server.step(params, ClientFiles([path], layout, budget=1 << 16), [0]),
        ),
        (path, lambda: agg.save(path), lambda: fastagg.load(path)),
        (
            shard,
            lambda: checkpoint.write(shard, "mifa", agg.options(), agg.state_dict()),
            lambda: storage.read(folder, manifest, 0, width),
        ),
        (  # as the simulation reads its files
            path,
            lambda: save_file({"params": torch.randn(width)}, path),
            lambda: tensor_file.load(path, limit=1 << 20),
        ),
    ]
    for number in range(count):
        target, write, read = readers[number % len(readers)]
        write()
        wait, length = draw.random() * 4e-3, draw.randrange(target.stat().st_size)
        cutter = threading.Thread(target=_cut, args=(target, wait, length))
        cutter.start()
        try:
            read()
            found["read before the cut"] += 1
        except ValueError:
            found["refused"] += 1
        cutter.join()
    return found


def _cut(path: Path, wait: float, length: int) -> None:
    time.sleep(wait)
    os.truncate(path, length)


def memory(seed: int, folder: Path) -> float:
    """Return the largest memory that loading a forged file took, relative to the honest file."""
    draw, path, clients, width = random.Random(f"memory {seed}"), folder / "large", 64, 1 << 17
    agg = fastagg.make("stale", num_clients=clients, num_params=width)
    agg.step(torch.zeros(width), torch.randn(4, width), range(4))
    agg.save(path)
    content = path.read_bytes()
    most = 0.0
    for number in range(20):
        if number:
            options, state = agg.options(), dict(agg.live_state())
            name = draw.choice(["num_clients", "num_params"])
            options[name] = draw.choice([2**20, 2**31, 2**40, options[name] + 1])
            checkpoint.write(path, draw.choice(["stale", "mifa", "mimic"]), options, state)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again here
        before = _peak()
        try:
            loaded: Aggregator | None = fastagg.load(path)
        except CheckpointError:
            loaded = None
        assert (loaded is None) == (number > 0)
        del loaded
        most = max(most, (_peak() - before) / len(content))
    return most


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("--flips", type=int, default=2000, help="bit flips in all")
    command.add_argument("--truncated", type=int, default=99, help="files cut at every byte")
    command.add_argument("--crafted", type=int, default=20, help="forged files of a configuration")
    command.add_argument("--cuts", type=int, default=40, help="files cut while they are read")
    command.add_argument("--seed", type=int, default=0)
    return command


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {
            "bit flips": flips(options.flips, options.seed, folder),
            "truncations": truncations(options.truncated, folder),
            "forged files": crafted(options.crafted, options.seed, folder),
            "files cut while read": cuts(options.cuts, options.seed, folder),
        }
        ratio = memory(options.seed, folder)
    wrong = 0
    for run, found in runs.items():
        print(f"{run}: {found.total()}")
        for result, times in sorted(found.items()):
            print(f"  {result}: {times}")
            known = {"refused", "read before the cut"}
            known |= {"accepted"} if run == "forged files" else set()
            wrong += times if result not in known else 0
    print(f"memory of a load: at most {ratio:.2f} times the size of the honest file")
    wrong += ratio >= 2.0
    print("nothing went wrong" if not wrong else f"{wrong} went wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
