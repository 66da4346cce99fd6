# SPDX-License-Identifier: Apache-2.0
"""The command line: fastagg-sim run | experiment | demo | list | data | plot | claims | timings.

Exit codes:
    0    success
    1    at least one job failed
    2    wrong usage, missing data, a file that cannot be read or written, or no GPU although one
         was requested
    3    success, but a claim of the experiment fails, or a share exceeds --limit (timings)
    130  stopped by Ctrl-C
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastagg_sim import experiments
from fastagg_sim.config import ConfigError
from fastagg_sim.registry import check_name
from fastagg_sim.run_options import RunOptions

if TYPE_CHECKING:
    from fastagg_sim.experiments import Claim, Experiment, Options

# torch and matplotlib take seconds to import, so each command imports the modules that need them
# only when it runs.


@dataclass(frozen=True)
class ListCommand:
    """List all rules, dropout and latency processes, schedules and partitions with their options,
    and all models, experiments and data sets.

    KEY=VALUE is an option with its default, KEY alone one that must be given. A rule that cannot
    have a value of an option of every rule, such as staleness, says why.
    """

    def execute(self, console: Console) -> int:
        from fastagg_sim import data, models
        from fastagg_sim.named_options import (
            of_every_rule,
            of_latencies,
            of_partitions,
            of_processes,
            of_rules,
            of_schedules,
        )

        rules = {**of_rules(), "(every rule)": of_every_rule()}
        for title, found in (
            ("rules (--rules NAME:KEY=VALUE,KEY=VALUE)", rules),
            ("dropout processes (--dropout NAME:KEY=VALUE,KEY=VALUE)", of_processes()),
            ("latency processes (--latency NAME:KEY=VALUE,KEY=VALUE)", of_latencies()),
            ("schedules (--schedule NAME:KEY=VALUE,KEY=VALUE)", of_schedules()),
            ("partitions (--partition NAME --partition-options KEY=VALUE)", of_partitions()),
        ):
            console.print(title, markup=False, highlight=False)
            width = max(map(len, found))
            for name, options in found.items():
                line = f"  {name:{width}}  {', '.join(options)}".rstrip()
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            console.print()
        console.print("models\n  " + ", ".join(models.MODELS), highlight=False, soft_wrap=True)
        console.print()
        _print_experiments(console)
        console.print("\ndata sets")
        for name, info in data.DATASETS.items():
            console.print(f"  {name:18s} {info.summary}", highlight=False)
        return 0


@dataclass(frozen=True)
class DataCommand:
    """Get a data set and store it in the cache."""

    name: tyro.conf.Positional[str]
    """Name of the data set; `fastagg-sim list` shows all."""
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Folder (or archive) with the original files, tried before any download. It is not read if the
    cache has the data."""

    def execute(self, console: Console) -> int:
        from fastagg_sim import data

        try:
            check_name("data set", self.name, data.DATASETS)
        except ValueError as error:
            raise ConfigError(f"data: {error}") from error
        path = data.fetch(
            self.name,
            source_dir=self.source,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
        if path is not None:
            console.print(str(path), markup=False, highlight=False, soft_wrap=True)
        return 0


@dataclass(frozen=True)
class PlotCommand:
    """Redraw the figures of a results folder from its CSV files."""

    folder: tyro.conf.Positional[Path]
    """Results folder; it must contain metrics.csv."""

    def execute(self, console: Console) -> int:
        from fastagg_sim.plots import plot_folder

        for path in plot_folder(self.folder):
            console.print(str(path), markup=False, highlight=False, soft_wrap=True)
        return 0


@dataclass(frozen=True)
class ClaimsCommand:
    """Check the claims of finished experiments again, from their CSV files.

    Writes claims.json, tables and figures of every experiment in a folder, claims.md, and the
    counts in the README.md of the folder. Nothing is trained.
    """

    folder: tyro.conf.Positional[Path] = Path("results")
    """Folder that contains the results folders of experiments."""
    only_claims: bool = False
    """Draw no figures."""

    def execute(self, console: Console) -> int:
        if not self.folder.is_dir():
            raise ConfigError(f"claims {self.folder}: expected a folder with results, found none")
        known = experiments.available()
        for path in experiments.repeat(self.folder, known, figures=not self.only_claims):
            console.print(str(path), markup=False, highlight=False, soft_wrap=True)
        return 0


@dataclass(frozen=True)
class TimingsCommand:
    """Show how finished runs spent their time: local training, the server's step, evaluation."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = (Path("results"),)
    """Results folders, or folders that contain results folders."""
    limit: float = 0.05
    """Largest fraction of a round that the server's step may take; the exit code is 3 if it takes
    more for any method."""

    def execute(self, console: Console) -> int:
        from fastagg_sim.timings import read_spent, shares

        if not 0.0 <= self.limit <= 1.0:  # a NaN would pass any share
            raise ConfigError(f"--limit: expected a fraction in [0, 1], got {self.limit}")
        spent = read_spent(self.folders)
        grid = shares(spent, self.limit)
        console.print(grid.to_markdown(), markup=False, highlight=False, soft_wrap=True)
        return 3 if any(one.share > self.limit for one in spent) else 0


def _run_command(options: RunOptions, console: Console) -> int:
    from fastagg_sim.report import compute
    from fastagg_sim.results import read_config

    config = options.build() if options.config is None else read_config(options.config)
    if options.out is None and (config.name in ("", "..") or config.name != Path(config.name).name):
        raise ConfigError(f"--name: expected the name of a folder in results, got {config.name!r}")
    out = options.out or Path("results") / config.name
    compute(
        [(out, config)],
        workers=options.workers,
        checkpoint_seconds=options.checkpoint_seconds,
        reuse=options.reuse,
        console=console,
    )
    return 0


def _experiment_command(experiment: Experiment, options: Options, console: Console) -> int:
    from fastagg_sim.devices import require_device
    from fastagg_sim.report import compute
    from fastagg_sim.results import read_sources

    experiment.check_options(options)
    require_device(options.device)
    read_sources(options.reuse)  # before `runs`, which may compute for an hour
    results = Path("results/quick") if options.quick else Path("results")
    out = options.out or results / experiment.name
    parts = {name: (out / name, config) for name, config in experiment.runs(options).items()}
    compute(list(parts.values()), workers=options.workers, reuse=options.reuse, console=console)
    folders = {name: path for name, (path, _) in parts.items()} or {"": out}
    out.mkdir(parents=True, exist_ok=True)
    written = [] if experiment.prepare is None else list(experiment.prepare(folders, options))
    conclusion = experiments.conclude(experiment, options, folders, out)
    claims = conclusion.claims
    if conclusion.table is not None:
        conclusion.table.show(console)
    console.print(_claims_table(claims))
    for path in written + conclusion.files:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    failed = sum(claim.verdict == "fails" for claim in claims)
    undecided = sum(claim.verdict == "undecided" for claim in claims)
    console.print(
        f"claims in these results: {len(claims) - failed - undecided} hold, {failed} fail, "
        f"{undecided} undecided"
    )
    if options.quick:
        console.print("--quick ran a reduced experiment; the claims are about the full one")
    return 3 if failed else 0


def _print_experiments(console: Console) -> None:
    console.print("experiments", highlight=False)
    rows = [("name", "paper", "figure", "2 cores", "--quick", "GPU", "description")]
    for experiment in experiments.available().values():
        expected = experiment.expected
        times = ("", "", "")
        if expected is not None:
            times = (_minutes(expected.cpu), _minutes(expected.quick), _minutes(expected.gpu))
        source = (experiment.name, experiment.paper, experiment.figure)
        rows.append((*source, *times, experiment.title))
    form = "  {:{}}  {:{}}  {:{}}  {:>{}}  {:>{}}  {:>{}}  {}"
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for *cells, description in rows:
        text = form.format(*chain(*zip(cells, widths, strict=True)), description)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(
        "  Times are for the default options. GPU times (--device cuda) are estimates, not "
        "measurements; none: no estimate, since models are so small that a GPU may not help.",
        highlight=False,
        soft_wrap=True,
    )


def _minutes(minutes: float | None) -> str:
    if minutes is None:
        return "none"
    if minutes < 90:
        return f"{minutes:g} min"
    hours = minutes / 60
    return f"{hours:.0f} h" if hours < 72 else f"{hours / 24:.0f} days"


def _claims_table(claims: Sequence[Claim]) -> Table:
    styles = {"holds": "green", "fails": "bold red", "undecided": "yellow"}
    table = Table(title="claims", title_justify="left")
    for column in ("verdict", "claim"):
        table.add_column(column)
    for claim in claims:
        numbers = ", ".join(f"{name} {value}" for name, value in claim.numbers.items())
        cells = (f"{claim.verdict}\n({claim.basis})", f"{claim.text}\n{numbers}")
        table.add_row(*map(escape, cells), style=styles[claim.verdict])
    return table


def _commands() -> Any:
    """Return the type that tyro parses: a union of all subcommands.

    `experiment` is itself a union with one subcommand per experiment.
    """
    known = experiments.available()
    demo = known["demo"]
    figures: Any = Union[  # noqa: UP007 (built at run time)
        tuple(
            Annotated[e.options, tyro.conf.subcommand(name, description=e.summary)]
            for name, e in known.items()
        )
    ]
    return Union[  # noqa: UP007
        Annotated[RunOptions, tyro.conf.subcommand("run")],
        Annotated[
            figures,
            tyro.conf.subcommand("experiment", description="Reproduce a figure of a paper."),
        ],
        Annotated[demo.options, tyro.conf.subcommand("demo", description=demo.title)],
        Annotated[ListCommand, tyro.conf.subcommand("list")],
        Annotated[DataCommand, tyro.conf.subcommand("data")],
        Annotated[PlotCommand, tyro.conf.subcommand("plot")],
        Annotated[ClaimsCommand, tyro.conf.subcommand("claims")],
        Annotated[TimingsCommand, tyro.conf.subcommand("timings")],
    ]


def _execute(command: Any, console: Console) -> int:
    if isinstance(
        command, ListCommand | DataCommand | PlotCommand | ClaimsCommand | TimingsCommand
    ):
        return command.execute(console)
    if isinstance(command, RunOptions):
        return _run_command(command, console)
    (experiment,) = (e for e in experiments.available().values() if e.options is type(command))
    return _experiment_command(experiment, command, console)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse `arguments` (default: `sys.argv`), run the command and return its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given == ["--version"]:
        print(_versions())
        return 0
    console = Console()
    command = tyro.cli(
        _commands(),
        prog="fastagg-sim",
        description="Simulation of federated learning under client dropout. `fastagg-sim "
        "--version` prints versions.",
        args=given,
        config=(
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.OmitArgPrefixes,
            tyro.conf.FlagCreatePairsOff,
        ),
    )
    from fastagg_sim.data import DataError
    from fastagg_sim.report import JobsFailed
    from fastagg_sim.runner import Interrupted

    try:
        if isinstance(command, RunOptions):
            command.check_alone(given)
        return _execute(command, console)
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except JobsFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Interrupted:
        print("stopped; run the same command again to resume", file=sys.stderr)
        return 130
    except KeyboardInterrupt:  # outside of jobs, which save checkpoints
        print("stopped", file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def _versions() -> str:
    import platform

    import torch

    import fastagg

    python = platform.python_version()
    return f"fastagg-sim {fastagg.__version__} (PyTorch {torch.__version__}, Python {python})"
