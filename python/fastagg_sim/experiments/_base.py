# SPDX-License-Identifier: Apache-2.0
"""What an experiment is: configurations to run and claims to check on their results."""

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
    """What every experiment lets its user choose."""

    out: Path | None = None
    """Folder of the results; results/NAME by default."""
    seeds: tuple[int, ...] = (0,)
    """One repetition per seed."""
    rounds: int | None = None
    """Number of rounds; the paper's by default."""
    eval_every: int = 1
    """Evaluate the global model in every n-th round."""
    workers: int | None = None
    """Number of worker processes; by default one per core, on GPUs one per GPU."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where models, data and the server are. cuda: on a GPU, which trains clients at once. Results
    differ by rounding."""
    quick: bool = False
    """Scaled down to minutes, with one seed: fewer rounds, settings or samples."""

    def chosen_rounds(self, full: int, quick: int) -> int:
        return self.rounds or (quick if self.quick else full)

    def chosen_seeds(self) -> tuple[int, ...]:
        return self.seeds[:1] if self.quick else self.seeds


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, whether these results show it, and the numbers that decide.

    `passed` is None where the results cannot tell, and `numbers` says why."""

    text: str
    passed: bool | None
    numbers: dict[str, Any]

    @property
    def verdict(self) -> str:
        return {True: "PASS", False: "FAIL", None: "NOT MEASURED"}[self.passed]


@dataclass(frozen=True)
class Expected:
    """How long an experiment takes with its default options.

    cpu, quick: minutes on two cores, one torch thread each; the second with `--quick`.
    gpu: minutes on a data-centre GPU: an estimate, as long as nobody has measured it; None: there
        is none, and models are so small that a GPU may not gain anything.
    """

    cpu: float
    quick: float
    gpu: float | None = None


@dataclass(frozen=True)
class Experiment:
    """A figure or table of a paper.

    `configs(options)` gives the configurations by the name of their subfolder ("" for the results
    folder itself), maybe none; it may first compute what they depend on. What is done with the
    finished results gets their folders by the same names (without configurations the results folder
    as ""): `claims(folders, options)` judges them; `draw(folders, options, path)` writes the
    paper's figure to `path`; `table(folders, options)` makes the paper's table. Before all these,
    `prepare(folders, options)` writes what they need besides, and returns the paths.

    unused: options that all experiments have and this one has no use for; they are refused.
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
        """Paper, figure and title in a line."""
        part = (
            self.figure if self.figure.startswith(("table", "theorem")) else f"figure {self.figure}"
        )
        return f"{self.paper}, {part}: {self.title}" if self.paper else self.title

    def runs(self, options: Options) -> dict[str, Config]:
        """What `configs` gives, on the device that `options` name."""
        from fastagg_sim.devices import on_device  # imports torch, which takes seconds

        found = self.configs(options)
        return {name: on_device(config, options.device) for name, config in found.items()}

    def check_options(self, options: Options) -> None:
        """ConfigError if `options` has what this experiment would ignore."""
        defaults = self.options()
        for name in self.unused:
            value = getattr(options, name)
            if value != getattr(defaults, name):
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option}: {self.name} has no use for it, got {value}")


def claims_json(experiment: Experiment, claims: Sequence[Claim]) -> str:
    content = {
        "experiment": experiment.name,
        "claims": [{**asdict(claim), "verdict": claim.verdict} for claim in claims],
    }
    return json.dumps(content, indent=2) + "\n"
