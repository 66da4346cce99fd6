# SPDX-License-Identifier: Apache-2.0
"""The type of an experiment: configurations to run, and claims to check on their results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from fastagg_sim.config import Config, ConfigError
from fastagg_sim.files import read_json
from fastagg_sim.tables import Grid
from fastagg_sim.verdicts import Statement, Verdict, judge

_WITHOUT_EFFECT = ("out", "workers", "device", "reuse")  # on the results, up to rounding errors


@dataclass(frozen=True)
class Options:
    """The options of all experiments."""

    out: Path | None = None
    """Results folder; by default results/NAME, with --quick results/quick/NAME."""
    seeds: tuple[int, ...] = (0,)
    """Seeds; the experiment is repeated once per seed."""
    rounds: int | None = None
    """Number of rounds; by default that of the full experiment, or with --quick that of the reduced
    one."""
    eval_every: int = 1
    """Evaluate the global model every this many rounds."""
    workers: int | None = None
    """Number of worker processes; by default one per core, or one per GPU with --device cuda."""
    reuse: tuple[Path, ...] = ()
    """Results folders, or folders that contain some: jobs that they have with the same settings are
    copied from there and not computed again."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the models, the data and the server. A GPU (cuda) trains many clients at once. The
    results of cpu and cuda differ by rounding errors."""
    quick: bool = False
    """Run a reduced experiment that takes minutes: fewer rounds, settings or samples, and only the
    first seed."""

    def chosen_rounds(self, full: int, quick: int) -> int:
        """Return `rounds` if it is set, else `full`, or `quick` with --quick."""
        if self.rounds is not None:
            return self.rounds
        return quick if self.quick else full

    def chosen_seeds(self) -> tuple[int, ...]:
        """Return the seeds to run: with --quick only the first one."""
        return self.seeds[:1] if self.quick else self.seeds


@dataclass(frozen=True)
class Claim:
    """A statement of the paper and whether the results confirm it.

    text: the statement, with its margin and the statistic that it is about.
    verdict: "holds", "fails" or "undecided", by the rule of `fastagg_sim.verdicts`.
    basis: on what the verdict rests: "3 seeds", "one seed", "counted" (no interval is needed), or
        "no data".
    numbers: the numbers on which the decision is based, or the reason why there is none.
    """

    text: str
    verdict: Verdict
    basis: str
    numbers: dict[str, Any]

    @staticmethod
    def about(
        text: str, statements: Sequence[Statement], numbers: Mapping[str, Any] | None = None
    ) -> Claim:
        """Return the claim that all `statements` are true.

        numbers: further numbers to show. The estimates with their intervals are added.
        """
        seeds = min(statement.estimate.seeds for statement in statements)
        shown = {statement.name: str(statement.estimate) for statement in statements}
        basis = "one seed" if seeds == 1 else f"{seeds} seeds"
        known = {
            name: "no value" if isinstance(value, float) and math.isnan(value) else value
            for name, value in (numbers or {}).items()
        }
        return Claim(text, judge(statements), basis, {**known, **shown})

    @staticmethod
    def counted(text: str, true: bool, numbers: Mapping[str, Any]) -> Claim:
        """Return a claim about the runs at hand, or about numbers without noise."""
        return Claim(text, "holds" if true else "fails", "counted", dict(numbers))

    @staticmethod
    def unmeasured(text: str, numbers: Mapping[str, Any]) -> Claim:
        """Return a claim about which the results say nothing; `numbers` says why."""
        return Claim(text, "undecided", "no data", dict(numbers))


@dataclass(frozen=True)
class Expected:
    """The run time of an experiment with its default options, in minutes.

    cpu: on two cores, with one torch thread each.
    quick: the same with `--quick`.
    gpu: on a data-centre GPU; this is an estimate, not a measurement. None: no estimate, since
        the models are so small that a GPU may not help.
    """

    cpu: float
    quick: float
    gpu: float | None = None


@dataclass(frozen=True)
class Experiment:
    """A figure or table of a paper.

    name: the name on the command line and of the results folder.
    title: one line for listings.
    options: the type of its options.
    configs: `configs(options)` returns the configurations to run, by the name of their subfolder
        ("" for the results folder itself). There may be none. It may run computations that the
        configurations depend on.
    claims: `claims(folders, options)` checks the claims on the finished results.
    paper, figure: the source.
    expected: how long it takes.
    draw: `draw(folders, options, path)` writes the paper's figure to `path`.
    table: `table(folders, options)` returns the paper's table.
    prepare: `prepare(folders, options)` is called before claims, table and draw. It writes further
        files that they need and returns the paths.
    unused: options of all experiments that do not apply to this one; they are refused.

    `folders` are the folders of the finished results by the names that `configs` returned; without
    configurations it is the results folder under the name "".
    """

    name: str
    title: str
    options: type[Options]
    configs: Callable[[Any], Mapping[str, Config]]
    claims: Callable[[Mapping[str, Path], Any], Sequence[Claim]]
    paper: str = ""
    figure: str = ""
    expected: Expected | None = None
    draw: Callable[[Mapping[str, Path], Any, Path], object] | None = None
    table: Callable[[Mapping[str, Path], Any], Grid] | None = None
    prepare: Callable[[Mapping[str, Path], Any], Sequence[Path]] | None = None
    unused: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """Paper, figure and title in one line."""
        part = (
            self.figure if self.figure.startswith(("table", "theorem")) else f"figure {self.figure}"
        )
        return f"{self.paper}, {part}: {self.title}" if self.paper else self.title

    def runs(self, options: Options) -> dict[str, Config]:
        """Return the configurations of `configs`, on the device of `options`."""
        from fastagg_sim.devices import on_device  # imports torch, which takes seconds

        found = self.configs(options)
        return {name: on_device(config, options.device) for name, config in found.items()}

    def check_options(self, options: Options) -> None:
        """Raise ConfigError if `options` sets an option that this experiment does not use, has
        numbers below 1 where rounds are counted, or a list that is empty or has a value twice."""
        defaults = self.options()
        for name in self.unused:
            value = getattr(options, name)
            if value != getattr(defaults, name):
                raise ConfigError(
                    f"{_flag(name)}: {self.name} does not use this option, got {value}"
                )
        for name in ("rounds", "eval_every"):
            value = getattr(options, name)
            if value is not None and value < 1:
                raise ConfigError(f"{_flag(name)}: expected at least 1, got {value}")
        for field in fields(options):
            values = getattr(options, field.name)
            if not isinstance(values, tuple) or field.name == "reuse":
                continue
            if not values and getattr(defaults, field.name):
                raise ConfigError(f"{_flag(field.name)}: expected at least one value, got none")
            if len(set(values)) < len(values):
                shown = " ".join(map(str, values))
                raise ConfigError(f"{_flag(field.name)}: expected each value once, got {shown}")


def _flag(name: str) -> str:
    """Return the option `name` as on the command line."""
    return "--" + name.replace("_", "-")


def claims_json(experiment: Experiment, options: Options, claims: Sequence[Claim]) -> str:
    """Return the contents of claims.json.

    They include the options that differ from the defaults, as far as results depend on them, so
    that `read_claims_json` can repeat the check.
    """
    defaults = type(options)()
    changed = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if field.name not in _WITHOUT_EFFECT
        and getattr(options, field.name) != getattr(defaults, field.name)
    }
    content = {
        "experiment": experiment.name,
        "options": changed,
        "claims": [asdict(claim) for claim in claims],
    }
    return json.dumps(content, indent=2) + "\n"


def claims_content(path: Path) -> dict[str, Any]:
    """Return the content of a claims.json. Raises ConfigError if it has another form."""
    content = read_json(path)
    kinds = {"experiment": str, "options": dict, "claims": list}
    if not isinstance(content, dict) or any(
        not isinstance(content.get(name), kind) for name, kind in kinds.items()
    ):
        raise ConfigError(f"{path}: expected an object with {', '.join(kinds)}")
    return content


def read_claims_json(path: Path, known: Mapping[str, Experiment]) -> tuple[Experiment, Options]:
    """Return the experiment that wrote a claims.json, and its options.

    known: all experiments by name.

    Raises ConfigError if it has another form, or names an unknown experiment or option.
    """
    content = claims_content(path)
    name, given = content["experiment"], content["options"].items()
    if name not in known:
        raise ConfigError(f"{path}: experiment: expected one of {sorted(known)}, got {name!r}")
    experiment = known[name]
    unknown = {option for option, _ in given} - {field.name for field in fields(experiment.options)}
    if unknown:
        raise ConfigError(f"{path}: options: {name} has no {', '.join(sorted(unknown))}")
    options: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given
    }
    return experiment, experiment.options(**options)
