# SPDX-License-Identifier: Apache-2.0
"""Random streams derived from one seed.

Every random choice of a simulation names its stream, for instance `("dropout", round)` or
`("batches", round, client)`, and gets a new generator that depends only on the seed of the run and
on that name. The choices of a round therefore do not depend on how many numbers earlier rounds
drew, on the order in which clients train, or on whether the run was resumed. Checkpoints contain no
random state.

Streams in use: "data", "partition", "dropout", "latency", "schedule", "model", "batches", "layers",
"train-loss", "noise", "rule".
"""

from __future__ import annotations

import hashlib
import json
import operator

import numpy as np
import torch

_MANY = 8192  # numbers, from which on a whole random order takes longer than some draws


def derive(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for the stream `names` of a run with `seed`; the same on every machine.

    seed: any integer, including negative ones.
    names: strings and integers. 1 and "1" are different streams, and so are ("a", "b") and ("ab",).

    Raises TypeError if `seed` is not an integer or a name is neither a string nor an integer.
    """
    parts: list[str | int] = [_as_int("seed", seed)]
    parts += [name if isinstance(name, str) else _as_int("names", name) for name in names]
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """Return a new CPU generator for the stream `names`.

    PyTorch's CPU generator only uses the low 32 bits of a seed, so among n streams two are equal
    with a probability of about n^2 / 2^33. For (round, client) streams such a collision only means
    that two clients use the same order of samples.
    """
    return torch.Generator().manual_seed(derive(seed, *names))


def uniform(seed: int, *names: str | int) -> float:
    """Return the number of the stream `names`, uniform in (0, 1); the same on every machine.

    It is one of 2^52 equally likely numbers, the middles of intervals of equal length. For streams
    of a single number; no generator is made.
    """
    return ((derive(seed, *names) >> 11) + 0.5) / (1 << 52)


def numpy_generator(seed: int, *names: str | int) -> np.random.RandomState:
    """Return a new numpy generator for the stream `names`.

    Used for generated data sets: numpy guarantees that the numbers of a RandomState never change,
    while torch's normal numbers differ in the last bit between instruction sets.
    """
    return np.random.RandomState(np.random.PCG64(derive(seed, *names)))


def first_of_order(count: int, chosen: int, rng: torch.Generator) -> torch.Tensor:
    """Return the first `chosen` numbers of a random order of 0 ... count - 1, int64.

    Of few numbers among many, only those are drawn: the time and memory depend on `chosen` alone.
    Otherwise the result is `torch.randperm(count)[:chosen]`.
    """
    if count < _MANY or 2 * chosen > count:
        return torch.randperm(count, generator=rng)[:chosen]
    # Independent draws without their repetitions are a random order, too.
    found: dict[int, None] = {}
    while len(found) < chosen:
        more = torch.randint(count, (2 * chosen,), generator=rng)
        found.update(dict.fromkeys(more.tolist()))
    return torch.tensor(list(found)[:chosen])


def _as_int(argument: str, value: object) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{argument}: expected an integer, got the bool {value!r}")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        expected = "an integer" if argument == "seed" else "strings and integers"
        raise TypeError(
            f"{argument}: expected {expected}, got {value!r} ({type(value).__name__})"
        ) from None
