# SPDX-License-Identifier: Apache-2.0
"""The type of an experiment: configurations to run, and claims to check on their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fastagg_sim.config import Config, ConfigError
from fastagg_sim.tables import Grid


@dataclass(frozen=True)
class Options:
    """The options of all experiments."""

    out: Path | None = None
    """Results folder; results/NAME by default."""
    seeds: tuple[int, ...] = (0,)
    """Seeds; the experiment is repeated once per seed."""
    rounds: int | None = None
    """Number of rounds; by default that of the paper."""
    eval_every: int = 1
    """Evaluate the global model every this many rounds."""
    workers: int | None = None
    """Number of worker processes; by default one per core, or one per GPU with --device cuda."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the models, the data and the server. A GPU (cuda) trains many clients at once. The
    results of cpu and cuda differ by rounding errors."""
    quick: bool = False
    """Run a reduced experiment that takes minutes: fewer rounds, settings or samples, and only the
    first seed."""

    def chosen_rounds(self, full: int, quick: int) -> int:
        """Return `rounds` if it is set, else `full`, or `quick` with --quick."""
        return self.rounds or (quick if self.quick else full)

    def chosen_seeds(self) -> tuple[int, ...]:
        """Return the seeds to run: with --quick only the first one."""
        return self.seeds[:1] if self.quick else self.seeds


@dataclass(frozen=True)
class Claim:
    """A statement of the paper and whether the results confirm it.

    text: the statement.
    passed: whether it holds in the results; None if the results cannot decide it.
    numbers: the numbers on which the decision is based, or the reason why there is none.
    """

    text: str
    passed: bool | None
    numbers: dict[str, Any]

    @property
    def verdict(self) -> str:
        return {True: "PASS", False: "FAIL", None: "NOT MEASURED"}[self.passed]


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
        """Raise ConfigError if `options` sets an option that this experiment does not use."""
        defaults = self.options()
        for name in self.unused:
            value = getattr(options, name)
            if value != getattr(defaults, name):
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option}: {self.name} does not use this option, got {value}")


def claims_json(experiment: Experiment, claims: Sequence[Claim]) -> str:
    content = {
        "experiment": experiment.name,
        "claims": [{**asdict(claim), "verdict": claim.verdict} for claim in claims],
    }
    return json.dumps(content, indent=2) + "\n"
