# SPDX-License-Identifier: Apache-2.0
"""The command line: fastagg-sim run | experiment | demo | list | data | plot | timings.

Exit codes: 0 done; 1 a job failed; 2 wrong usage, or data or a GPU that is not there; 3 done, but a
claim of an experiment does not hold, or a share of `timings` is above the limit; 130 stopped by
Ctrl-C.
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
from rich.table import Table

from fastagg_sim import experiments
from fastagg_sim.config import ConfigError
from fastagg_sim.run_options import RunOptions

if TYPE_CHECKING:
    from fastagg_sim.experiments import Claim, Experiment, Options

# torch and matplotlib take seconds to import: commands import what needs them when they run.


@dataclass(frozen=True)
class ListCommand:
    """Names of rules, data sets, partitions, models, dropout processes and experiments."""

    def execute(self, console: Console) -> int:
        import fastagg
        from fastagg_sim import data, dropout, models, partition

        table = Table(show_header=False, box=None, pad_edge=False)
        for title, names in (
            ("rules", fastagg.available()),
            ("data sets", list(data.DATASETS)),
            ("partitions", list(partition.PARTITIONS)),
            ("models", list(models.MODELS)),
            ("dropout processes", dropout.available()),
        ):
            table.add_row(title, ", ".join(names))
        console.print(table)
        console.print()
        _print_experiments(console)
        console.print("\ndata sets")
        for name, info in data.DATASETS.items():
            console.print(f"  {name:18s} {info.summary}", highlight=False)
        return 0


@dataclass(frozen=True)
class DataCommand:
    """Bring a data set into the cache."""

    name: tyro.conf.Positional[str]
    """The data set; see `fastagg-sim list`."""
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Folder with the original files; without it, downloads are tried too."""

    def execute(self, console: Console) -> int:
        from fastagg_sim import data

        if self.name not in data.DATASETS:
            raise ConfigError(f"name: expected one of {list(data.DATASETS)}, got {self.name!r}")
        path = data.fetch(
            self.name,
            source_dir=self.source,
            progress=lambda line: console.print(line, markup=False, highlight=False),
        )
        if path is not None:
            console.print(str(path), markup=False, highlight=False, soft_wrap=True)
        return 0


@dataclass(frozen=True)
class PlotCommand:
    """Draw the figures of a results folder again, from its CSV files."""

    folder: tyro.conf.Positional[Path]
    """The results folder (with a metrics.csv)."""

    def execute(self, console: Console) -> int:
        from fastagg_sim.plots import plot_folder

        for path in plot_folder(self.folder):
            console.print(str(path), markup=False, highlight=False, soft_wrap=True)
        return 0


@dataclass(frozen=True)
class TimingsCommand:
    """Where the time of finished runs went: local training, the server's step, evaluation."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = (Path("results"),)
    """Results folders, or folders of such."""
    limit: float = 0.05
    """The part of a round that the server's step may take; exit code 3 if a method takes more."""

    def execute(self, console: Console) -> int:
        from fastagg_sim.timings import read_spent, shares

        spent = read_spent(self.folders)
        grid = shares(spent, self.limit)
        console.print(grid.to_markdown(), markup=False, highlight=False, soft_wrap=True)
        return 3 if any(one.share > self.limit for one in spent) else 0


def _run_command(options: RunOptions, console: Console) -> int:
    from fastagg_sim.report import compute
    from fastagg_sim.results import read_config

    options.check_alone()
    config = options.build() if options.config is None else read_config(options.config)
    out = options.out or Path("results") / config.name
    compute(
        [(out, config)],
        workers=options.workers,
        checkpoint_seconds=options.checkpoint_seconds,
        console=console,
    )
    return 0


def _experiment_command(experiment: Experiment, options: Options, console: Console) -> int:
    from fastagg_sim.devices import require_device
    from fastagg_sim.job_folder import write_atomically
    from fastagg_sim.report import compute

    experiment.check_options(options)
    require_device(options.device)
    out = options.out or Path("results") / experiment.name
    parts = {name: (out / name, config) for name, config in experiment.runs(options).items()}
    compute(list(parts.values()), workers=options.workers, console=console)
    folders = {name: path for name, (path, _) in parts.items()} or {"": out}
    out.mkdir(parents=True, exist_ok=True)
    written = [] if experiment.prepare is None else list(experiment.prepare(folders, options))
    claims = experiment.claims(folders, options)
    written.append(out / "claims.json")
    write_atomically(written[-1], experiments.claims_json(experiment, claims))
    if experiment.table is not None:
        grid = experiment.table(folders, options)
        written.append(out / "paper.md")
        write_atomically(written[-1], grid.to_markdown())
        console.print(grid.to_rich())
    if experiment.draw is not None:
        written.append(out / "figure.png")
        experiment.draw(folders, options, written[-1])
    console.print(_claims_table(claims))
    for path in written:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    failed = sum(claim.passed is False for claim in claims)
    if failed:
        console.print(f"{failed} of {len(claims)} claims do not hold in these results")
    if options.quick:
        console.print("--quick: scaled down; the claims are about the full experiment")
    return 3 if failed else 0


def _print_experiments(console: Console) -> None:
    console.print("experiments", highlight=False)
    rows = [("name", "paper", "figure", "2 cores", "--quick", "GPU", "what")]
    for experiment in experiments.available().values():
        expected = experiment.expected
        times = ("", "", "")
        if expected is not None:
            times = (_minutes(expected.cpu), _minutes(expected.quick), _minutes(expected.gpu))
        source = (experiment.name, experiment.paper, experiment.figure)
        rows.append((*source, *times, experiment.title))
    form = "  {:{}}  {:{}}  {:{}}  {:>{}}  {:>{}}  {:>{}}  {}"
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for *cells, what in rows:
        text = form.format(*chain(*zip(cells, widths, strict=True)), what)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(
        "  times with default options; GPU (--device cuda): an estimate, never measured; none: no "
        "estimate, since models are so small that a GPU may not gain anything",
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
    styles = {True: "green", False: "bold red", None: "yellow"}
    table = Table(title="claims", title_justify="left")
    for column in ("verdict", "claim", "numbers"):
        table.add_column(column)
    for claim in claims:
        numbers = ", ".join(f"{name} {value}" for name, value in claim.numbers.items())
        table.add_row(claim.verdict, claim.text, numbers, style=styles[claim.passed])
    return table


def _commands() -> Any:
    """The type that tyro parses: a union of subcommands, one per experiment below `experiment`."""
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
            tyro.conf.subcommand("experiment", description="Rerun a figure of a paper."),
        ],
        Annotated[demo.options, tyro.conf.subcommand("demo", description=demo.title)],
        Annotated[ListCommand, tyro.conf.subcommand("list")],
        Annotated[DataCommand, tyro.conf.subcommand("data")],
        Annotated[PlotCommand, tyro.conf.subcommand("plot")],
        Annotated[TimingsCommand, tyro.conf.subcommand("timings")],
    ]


def _execute(command: Any, console: Console) -> int:
    if isinstance(command, ListCommand | DataCommand | PlotCommand | TimingsCommand):
        return command.execute(console)
    if isinstance(command, RunOptions):
        return _run_command(command, console)
    (experiment,) = (e for e in experiments.available().values() if e.options is type(command))
    return _experiment_command(experiment, command, console)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run it; returns the exit code."""
    console = Console()
    command = tyro.cli(
        _commands(),
        prog="fastagg-sim",
        description="Simulation of federated learning under client dropout.",
        args=arguments,
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
        return _execute(command, console)
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except JobsFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Interrupted:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
