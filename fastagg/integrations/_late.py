# SPDX-License-Identifier: Apache-2.0
"""What a server keeps of earlier rounds, so that late answers to them can count."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PREFIX = "earlier."  # of the names of models in a checkpoint; the rest is the number of a round


@dataclass(eq=False)
class _Round:
    """A round that has been opened."""

    steps: int  # of the rule, before it
    params: Tensor | None  # [d], the model that was sent; rounds with the same one share it
    missing: set[str]  # senders that were asked and have not answered
    key: str  # by which answers name it


class EarlierRounds:
    """The models of the last rounds, and the senders that have not answered yet.

    Clients send weights, so the update of a late answer is the difference from the model of its own
    round. Its age is the number of steps of the rule since then, which is less than the number of
    rounds if the rule took no step in some. A model is kept for ``most`` steps.

    One thread may call :meth:`find` and :meth:`problem` while another calls the other methods; for
    more, the caller has a lock.

    Args:
        most: the largest age of an answer, ``max_staleness``; None or 0: nothing is kept, and no
            late answer counts.
        models: whether models are kept; clients that send updates need none.
    """

    def __init__(self, most: int | None, models: bool = True) -> None:
        self.most = most or 0
        self.models = models
        self._rounds: dict[int, _Round] = {}  # replaced and never changed, for other threads

    def begin(
        self, number: int, senders: Iterable[str], params: Tensor, steps: int, key: str = ""
    ) -> None:
        """Note a round: number, who is asked, the model [d], the steps of the rule, and the key."""
        if not self.most:
            return
        last = next(reversed(self._rounds.values()), None)
        own = None if last is None else last.params
        if not self.models:
            own = None
        elif own is None or not torch.equal(own, params):
            own = params.clone()
        self._rounds = {**self._rounds, number: _Round(steps, own, set(senders), key)}

    def end(self, number: int, answered: Collection[str]) -> None:
        """Note that senders have answered in a round, in time or late."""
        if number in self._rounds:
            self._rounds[number].missing.difference_update(answered)

    def prune(self, steps: int) -> None:
        """Drop the rounds to which an answer would be too old after this number of steps."""
        self._rounds = {n: r for n, r in self._rounds.items() if steps - r.steps <= self.most}

    def forget(self, senders: Collection[str]) -> None:
        """Note that senders have left: their answers do not count any more."""
        for number in self._rounds:
            self.end(number, senders)

    def oldest(self, present: int) -> int:
        """Return the number of the first round that is kept; ``present`` if none is."""
        return min(self._rounds, default=present)

    def find(self, key: str) -> int | None:
        """Return the number of the round that has a key; None if none has."""
        return next((n for n, r in self._rounds.items() if r.key == key), None)

    def problem(self, number: int, sender: str) -> str | None:
        """Return why an answer to an earlier round cannot be used; None if it can."""
        if not self.most:
            return f"late: round {number} has ended"
        found = self._rounds.get(number)
        if found is None:
            return self.too_old(number)
        if sender not in found.missing:
            return f"was not asked in round {number}, or has answered already"
        return None

    def too_old(self, number: int) -> str:
        """Return why answers to a round do not count any more."""
        return f"late: round {number} is too old, max_staleness is {self.most}"

    def model(self, number: int) -> Tensor | None:
        """Return the model [d] of a round for which :meth:`problem` found none; None: not kept."""
        return self._rounds[number].params

    def steps(self, number: int) -> int:
        """Return the steps of the rule before a round for which :meth:`problem` found none."""
        return self._rounds[number].steps

    def saved(self, rounds: int, steps: int) -> tuple[list[list[Any]], dict[str, Tensor]]:
        """Return what a checkpoint needs for later answers to earlier rounds.

        Args:
            rounds: number of finished rounds; one that is open is left out.
            steps: of the rule, after them.

        Returns:
            For each round, as JSON: number, age, key, senders that have not answered, and the
            number of the round whose model it has, None if nobody needs one. And those models, by
            name.
        """
        listed: list[list[Any]] = []
        models: dict[str, Tensor] = {}
        owner, held = 0, None
        for number, found in self._rounds.items():
            age = steps - found.steps
            if number > rounds or age > self.most:
                continue
            model = found.params if found.missing else None
            if model is not None and model is not held:
                owner, held = number, model
                models[f"{_PREFIX}{number}"] = model
            listed.append(
                [number, age, found.key, sorted(found.missing), None if model is None else owner]
            )
        return listed, models

    def load(
        self, listed: object, state: Mapping[str, Tensor], params: Tensor, rounds: int, steps: int
    ) -> None:
        """Take the rounds that :meth:`saved` returned. They may come from anybody.

        Args:
            listed: the rounds.
            state: tensors of the checkpoint; the names of models begin with "earlier.".
            params: the model [d] of the checkpoint, whose shape and dtype the others have.
            rounds: number of finished rounds.
            steps: of the rule, now.

        Raises:
            ValueError: they are not from :meth:`saved`, or lack models that answers need. Nothing
                has changed.
        """
        if not isinstance(listed, list):
            raise ValueError(f"earlier: expected a list of rounds, got {type(listed).__name__}")
        found: dict[int, _Round] = {}
        used: dict[str, Tensor] = {}
        keys: set[str] = set()
        last, age_before = 0, self.most
        for entry in listed:
            number, age, key, missing, owner = _read_entry(entry)
            # Each round has at most one step, and later rounds are not older.
            if not last < number <= rounds or not 0 <= age <= min(age_before, rounds + 1 - number):
                raise ValueError(
                    f"earlier: expected rounds up to {rounds} in order, with ages of at most "
                    f"{self.most} that fall, got round {number} of age {age}"
                )
            if key in keys:
                raise ValueError(f"earlier: expected different keys, got {key[:100]!r} twice")
            model = None
            if owner is not None:
                name = f"{_PREFIX}{owner}"
                model = used[name] = _read_model(name, state.get(name), params)
            if self.models and missing and model is None:
                raise ValueError(
                    f"earlier: expected the model of round {number}, from which late answers "
                    "differ, got none; a run of clients that send updates keeps none"
                )
            found[number] = _Round(steps - age, model, set(missing), key)
            keys.add(key)
            last, age_before = number, age
        unknown = {name for name in state if name.startswith(_PREFIX)} - used.keys()
        if unknown:
            raise ValueError(f"earlier: expected models of rounds, got {sorted(unknown)[:5]}")
        self._rounds = found


def _read_entry(entry: object) -> tuple[int, int, str, list[str], int | None]:
    """Return the parts of a round in a checkpoint, with their types checked."""
    if isinstance(entry, list) and len(entry) == 5:
        number, age, key, missing, owner = entry
        if (
            all(type(value) is int for value in (number, age))
            and isinstance(key, str)
            and isinstance(missing, list)
            and all(isinstance(sender, str) for sender in missing)
            and (owner is None or (type(owner) is int and owner <= number))
        ):
            return number, age, key, missing, owner
    raise ValueError(
        "earlier: expected number, age, key, senders and the number of a model, got "
        f"{str(entry)[:200]}"
    )


def _read_model(name: str, model: Tensor | None, params: Tensor) -> Tensor:
    """Return the model of an earlier round in a checkpoint, checked."""
    if model is None or model.shape != params.shape or model.dtype != params.dtype:
        got = "none" if model is None else f"{[*model.shape]} {model.dtype}"
        raise ValueError(f"{name}: expected {[*params.shape]} {params.dtype}, got {got}")
    if not bool(torch.isfinite(model).all()):
        raise ValueError(f"{name}: expected finite values, got NaN or Inf")
    return model
