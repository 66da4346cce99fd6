# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/choosing.md, and draw docs/choosing.png and choosing.svg.

All differences are from full runs in results/; none is from a scaled-down one. Run from the root
of the repository: python docs/choosing.py
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.legend import Legend

import fastagg
from fastagg_sim.experiments import late_fig1
from fastagg_sim.experiments._statistics import (
    AREA,
    CHANGE,
    END,
    LOSS_CHANGE,
    LOSS_END,
    UPLOADS_END,
    Statistic,
    contrast,
)
from fastagg_sim.looks import looks
from fastagg_sim.plots import save
from fastagg_sim.records import Curve, read_curves
from fastagg_sim.verdicts import Estimate

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "choosing.md"
CIFAR, MNIST, TABLE3 = "fdms-fig1-cifar-seeds", "fdms-fig1-mnist", "mimic-table3"
TABLE3R, TABLE4 = "mimic-table3-rounds", "mimic-table4-fmnist"
ROUNDS = "mimic-table4-fmnist-rounds"
SU = {n: f"adversarial-fig{n}" for n in (1, 5, 9, 11)}
SHADOW = "adversarial-fig1-shadow"
LATE = "late-fig1"
FIG7, DTYPES = "mimic-fig7", "memory-dtypes"
MEANS, MEANS_CIFAR = "friends-from-means/mnist", "friends-from-means-cifar/cifar10"
LAST_FIFTH, WHOLE_TIME = late_fig1.statistics(late_fig1.LateOptions())
FULL = "full"

# (folder, end of the name of the dropout setting) -> how a table names it
DATA = {
    MNIST: "MNIST, {} absent",
    CIFAR: "CIFAR-10, {} absent",
    MEANS: "MNIST, {} absent",
    MEANS_CIFAR: "CIFAR-10, {} absent",
    DTYPES: "MNIST, {} absent",
    TABLE3: "Fashion-MNIST, absent for up to {} rounds, few rounds",
    TABLE3R: "Fashion-MNIST, absent for up to {} rounds",
    FIG7: "Fashion-MNIST, active with probability 0.1",
    TABLE4: "Fashion-MNIST, {} active, time-varying, few rounds",
    ROUNDS: "Fashion-MNIST, {} active, time-varying",
    SU[1]: "CIFAR-10, 2 of 100 active",
    SU[5]: "CIFAR-10, 8 of 100 active",
    SHADOW: "CIFAR-10, ε = 0.8",
    SU[9]: "Synthetic(1, 1), ε = 0.9",
    SU[11]: "Synthetic(1, 1), ε = 0.7",
    LATE: "MNIST, 1200 simulated seconds",
}
# method in the results -> how a table names it
METHODS = {
    "Full": "`fedavg` without dropout",
    "Dropout": "`fedavg`",
    "FDMS": "`fdms`",
    "FDMS first": "`fdms`, all clients in the first round",
    "Means": "`fdms-means`",
    "Means first": "`fdms-means`, all clients in the first round",
    "Stale": "`stale-models`",
    "FedAvg": "`fedavg`",
    "FedAvg late": "`fedavg` with late answers",
    "FedAvg waits": "`fedavg` that waits for all",
    "FedAvg variant": "`amplified`",
    "FedBuff": "`fedbuff`",
    "FedProx": "`fedavg`, FedProx's training",
    "FedProx variant": "`amplified`, FedProx's training",
    "GM": "`geometric-median`",
    "MIFA": "`mifa`",
    "MIFA int8": "`mifa` in int8",
    "MimiC": "`mimic`",
    "SCAFFOLD": "`scaffold`",
    "Stale int8": "`stale` in int8",
    "cclip": "`centered-clip`",
}
NAMES = {(DTYPES, "Stale"): "`stale`"}  # a method with another meaning in one folder
# A statistic -> its column. Statistics of one column do not occur in one section.
COLUMNS = {
    AREA: "on average",
    WHOLE_TIME: "on average",
    END: "at the end",
    UPLOADS_END: "at the end, in points",
    LAST_FIFTH: "at the end",
    CHANGE: "change between evaluations",
    LOSS_END: "train loss at the end",
    LOSS_CHANGE: "change of the train loss",
}


@functools.cache
def curves(folder: str, method: str, dropout: str) -> list[Curve]:
    """Return the curves of a method, one per seed. `dropout` is the end of the setting's name."""
    path = ROOT / "results" / folder
    files = (
        [path / "metrics.csv"] if (path / "metrics.csv").exists() else path.glob("*/metrics.csv")
    )
    found = [c for file in files for c in read_curves(file) if c.method == method]
    found = [c for c in found if c.dropout == FULL or c.dropout.endswith(dropout)]
    if not found:
        raise ValueError(f"{folder}: expected curves of {method} with {dropout}, found none")
    return found


@dataclass(frozen=True)
class Comparison:
    """`method` minus `other` in a statistic of a run."""

    folder: str
    dropout: str
    statistic: Statistic
    method: str
    other: str

    def estimate(self) -> Estimate:
        one, two = (curves(self.folder, m, self.dropout) for m in (self.method, self.other))
        return contrast([(1, one), (-1, two)], self.statistic)

    def points(self) -> Estimate:
        """Return the difference in accuracy in percentage points."""
        found = self.estimate()
        if self.statistic is UPLOADS_END or found.error is None:
            return found
        return replace(found, value=100 * found.value, error=100 * found.error)

    def cited(self) -> str:
        """Return the difference with its interval, as docs/choosing.md states it."""
        low, high = self.estimate().interval()
        digits = 1 if self.statistic is UPLOADS_END else 3
        return f"{self.estimate().value:+.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

    def cell(self) -> str:
        """Return the difference, and whether it is undecided."""
        low, high = self.estimate().interval()
        return self.cited() + (" undecided" if low <= 0.0 <= high else "")

    def setting(self) -> str:
        """Return the data, the dropout and the number of seeds."""
        away = self.dropout.removeprefix("=")
        share = f"{100 * float(away):.0f} %" if away.startswith("0.") else away
        seeds = self.estimate().seeds
        return f"{DATA[self.folder].format(share)}, {seeds} seed{'s' if seeds > 1 else ''}"


def _over(
    folder: str,
    dropouts: Sequence[str],
    method: str,
    other: str,
    statistics: Sequence[Statistic] = (AREA, END),
) -> Iterator[Comparison]:
    """Return the comparisons of two methods for each dropout setting and statistic."""
    for dropout in dropouts:
        for statistic in statistics:
            yield Comparison(folder, dropout, statistic, method, other)


LABELLED = (
    *(("MimiC", other) for other in ("FedAvg", "FedProx", "SCAFFOLD", "MIFA")),
    ("MIFA", "FedAvg"),
)  # the pairs that are compared with two labels per client
SECTIONS = {
    "groups": (
        *_over(MNIST, ("0.3", "0.5", "0.7"), "FDMS", "Dropout", (AREA, END, CHANGE)),
        *_over(MNIST, ("0.7",), "FDMS", "Full", (AREA, END, CHANGE)),
        *_over(CIFAR, ("0.5",), "FDMS", "Dropout", (AREA, END, CHANGE)),
        *_over(CIFAR, ("0.5",), "FDMS", "Full", (AREA, END, CHANGE)),
        *_over(MNIST, ("0.3", "0.5", "0.7"), "Stale", "Dropout", (AREA, END, CHANGE)),
        *_over(CIFAR, ("0.5",), "Stale", "Dropout", (AREA, END, CHANGE)),
        *_over(MNIST, ("0.7",), "Stale", "FDMS", (AREA, END, CHANGE)),
        *_over(CIFAR, ("0.5",), "Stale", "FDMS", (AREA, END, CHANGE)),
    ),
    "means": (
        *_over(MEANS, ("0.3", "0.5", "0.7", "0.9"), "Means", "FDMS"),
        *_over(MEANS, ("0.3", "0.5", "0.7", "0.9"), "Means", "Dropout"),
        *_over(MEANS, ("0.3", "0.5", "0.7", "0.9"), "FDMS", "Dropout"),
        *_over(MEANS, ("0.5", "0.7"), "Means first", "FDMS first"),
        *_over(MEANS_CIFAR, ("0.5", "0.7", "0.9"), "Means", "FDMS"),
        *_over(MEANS_CIFAR, ("0.5", "0.7", "0.9"), "Means", "Dropout"),
        *_over(MEANS_CIFAR, ("0.5", "0.7", "0.9"), "FDMS", "Dropout"),
    ),
    "labels": (
        *(
            Comparison(TABLE3, f"={tau}", UPLOADS_END, method, other)
            for tau in (20, 50, 100)
            for method, other in LABELLED
        ),
        Comparison(TABLE3, "=100", UPLOADS_END, "SCAFFOLD", "FedAvg"),
        *(
            Comparison(TABLE3R, f"={tau}", UPLOADS_END, method, other)
            for tau in (20, 50, 100)
            for method, other in (*LABELLED, ("SCAFFOLD", "FedAvg"))
        ),
        *(
            Comparison(TABLE4, rate, UPLOADS_END, method, other)
            for rate in ("0.1", "0.3", "0.5")
            for method, other in LABELLED
        ),
        *(
            Comparison(ROUNDS, rate, UPLOADS_END, method, other)
            for rate in ("0.1", "0.3", "0.5")
            for method, other in (*LABELLED, ("SCAFFOLD", "FedAvg"))
        ),
        *(
            Comparison(FIG7, "", UPLOADS_END, method, "FedAvg")
            for method in ("MimiC", "MIFA", "SCAFFOLD")
        ),
    ),
    "few": (
        *(
            Comparison(SU[1], "all", END, method, "FedAvg")
            for method in ("MIFA", "FedProx", "FedAvg variant", "GM")
        ),
        Comparison(SU[1], "all", END, "MIFA", "FedProx"),
        Comparison(SU[1], "all", CHANGE, "FedAvg variant", "FedAvg"),
        *(
            Comparison(SU[5], "all", END, method, "FedAvg")
            for method in ("MIFA", "FedProx", "FedAvg variant", "GM", "cclip")
        ),
        Comparison(SU[5], "all", END, "MIFA", "FedProx"),
        Comparison(SU[5], "all", CHANGE, "FedAvg variant", "FedAvg"),
    ),
    "adversary": (
        *(
            Comparison(SU[n], "", statistic, f"{method} variant", method)
            for n in (9, 11)
            for method, statistics in (
                ("FedAvg", (LOSS_END, LOSS_CHANGE)),
                ("FedProx", (LOSS_END,)),
            )
            for statistic in statistics
        ),
        *(
            Comparison(SU[n], "", END, m, "FedAvg")
            for n in (9, 11)
            for m in ("FedAvg variant", "MIFA", "cclip", "GM")
        ),
        *(
            Comparison(SHADOW, "", END, m, "FedAvg")
            for m in ("FedAvg variant", "MIFA", "FedProx", "FedProx variant", "GM", "cclip")
        ),
        Comparison(SHADOW, "", END, "FedProx variant", "FedProx"),
        *(Comparison(SHADOW, "", END, m, "FedProx variant") for m in ("MIFA", "cclip")),
    ),
    "late": (
        *(Comparison(LATE, FULL, LAST_FIFTH, method, "FedAvg") for method in late_fig1.REMEDIES),
        *(
            Comparison(LATE, FULL, WHOLE_TIME, method, "FedAvg waits")
            for method in ("MimiC", "MIFA", "FedBuff", "FedAvg late")
        ),
    ),
    "int8": tuple(
        Comparison(DTYPES, "0.7", END, f"{method} int8", method) for method in ("MIFA", "Stale")
    ),
}
COMPARISONS = tuple(comparison for section in SECTIONS.values() for comparison in section)


def differences(section: str) -> str:
    """Return the table of a section: a row per setting and pair, a column per statistic."""
    columns = list(dict.fromkeys(COLUMNS[c.statistic] for c in SECTIONS[section]))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for c in SECTIONS[section]:
        pair = " - ".join(NAMES.get((c.folder, m)) or METHODS[m] for m in (c.method, c.other))
        rows.setdefault((c.setting(), pair), {})[COLUMNS[c.statistic]] = c.cell()
    head = ["data, dropout", "difference", *columns]
    body = [[*key, *(cells.get(name, "") for name in columns)] for key, cells in rows.items()]
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


K, S, D = 100, 30, 10**6
COSTS: dict[str, dict[str, Any]] = {
    "`fedavg`": {},
    "`fdms`": {},
    "`mifa`, `stale`": {},
    "`mifa-client`": {},
    "`fedstale`": {},
    "`mimic`": {},
    '`mimic`, `mode="client"`': {"mode": "client"},
    "`scaffold`": {"local_work": 1.0},
    "`geometric-median`": {},
    "`centered-clip`, `reuse=True`": {"reuse": True},
}


def costs() -> str:
    """Return the table of what rules need, from `fastagg.plan`."""
    lines = ["| rule | state | moved per round |", "|---|---|---|"]
    for label, options in COSTS.items():
        rule = label.split("`")[1]
        plan = fastagg.plan(rule, num_clients=K, num_active=S, num_params=D, owned=True, **options)
        lines.append(f"| {label} | {_size(plan.state_bytes)} | {_size(plan.bytes_moved)} |")
    return "\n".join(lines)


def _size(number: float) -> str:
    unit, name = (10**6, "MB") if number >= 10**6 else (10**3, "kB")
    return f"{number / unit:.0f} {name}" if number else "0"


def with_tables(text: str) -> str:
    """Return a page with its tables: those between <!-- table NAME --> and <!-- end -->."""

    def table(found: re.Match[str]) -> str:
        made = costs() if found[1] == "costs" else differences(found[1])
        return f"<!-- table {found[1]} -->\n\n{made}\n\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


# --- the figure -------------------------------------------------------------------------------

PLAIN = ("Dropout", "FedAvg")  # plain averaging, in the papers' names
# Panels, with the sections that share their axis, and how the figure names these.
PANELS: tuple[dict[str, str], ...] = (
    {
        "groups": "Groups; all clients in the first round, except with fedavg",
        "means": "Groups; no round with all clients",
    },
    {
        "labels": "Two labels per client",
        "few": "Few active clients",
        "late": "Slow clients",
    },
    {"adversary": "An adversary"},
)
GAP, HEADING = 0.8, 2.2  # between two settings, and for a heading, in marks
INCHES = 0.125  # of a mark


def drawn(section: str) -> list[Comparison]:
    """Return the differences of a table that are in the figure: to plain averaging, at the end."""
    return [
        c
        for c in SECTIONS[section]
        if c.other in PLAIN and COLUMNS[c.statistic].startswith("at the end")
    ]


def gains(section: str) -> dict[str, dict[str, Estimate]]:
    """Return the `drawn` differences in points, by setting and method."""
    found: dict[str, dict[str, Estimate]] = {}
    for c in drawn(section):
        found.setdefault(c.setting(), {})[c.method] = c.points()
    return found


def draw(target: Path) -> None:
    every = [{section: gains(section) for section in panel} for panel in PANELS]
    how = looks(METHODS)
    heights = [_height(panel) for panel in every]
    figure, panels = plt.subplots(
        len(PANELS),
        1,
        figsize=(8.5, INCHES * sum(heights) + 1.4),
        height_ratios=heights,
        layout="constrained",
    )
    for panel, titles, sections in zip(panels, PANELS, every, strict=True):
        y = 0.0
        ticks: dict[float, str] = {}
        for section, rows in sections.items():
            panel.annotate(
                titles[section],
                (0.0, y + HEADING / 2 - GAP / 2),
                xycoords=("axes fraction", "data"),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                fontweight="bold",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
            y += HEADING
            top = y
            marks: dict[str, Artist] = {}
            for name, row in rows.items():
                ticks[y + (len(row) - 1) / 2] = name
                for method, gain in row.items():
                    color = how[method].color
                    panel.plot(gain.interval(), (y, y), color=color, linewidth=1.4)
                    (mark,) = panel.plot(gain.value, y, how[method].marker, color=color, zorder=3)
                    marks.setdefault(METHODS[method].replace("`", ""), mark)
                    y += 1
                panel.axhline(y - 0.5 + GAP / 2, color="#dddddd", linewidth=0.6)
                y += GAP
            legend = Legend(
                panel,
                list(marks.values()),
                list(marks),
                loc="center left",
                bbox_to_anchor=(1.0, (top + y - 1 - GAP) / 2),
                bbox_transform=panel.get_yaxis_transform(),
                frameon=False,
                fontsize=8,
            )
            panel.add_artist(legend)
            legend.set_clip_on(False)  # so that the layout leaves room for it
        panel.axvline(0.0, color="#000000", linewidth=0.8)
        panel.set_yticks(list(ticks), list(ticks.values()), fontsize=7.5)
        panel.tick_params(axis="y", length=0)
        panel.set_ylim(y - 0.5 - GAP / 2, -GAP)
        panel.grid(axis="x", color="#dddddd", linewidth=0.6)
    panels[-1].set_xlabel(
        "test accuracy at the end above that of fedavg under the same dropout, in points,\n"
        "with its 95 % interval; the axes differ"
    )
    save(figure, target)


def _height(sections: Mapping[str, Mapping[str, Mapping[str, Estimate]]]) -> float:
    """Return the height of a panel, in marks."""
    rows = [row for section in sections.values() for row in section.values()]
    return HEADING * len(sections) + GAP * len(rows) + sum(map(len, rows))


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw(PAGE.with_suffix(".png"))


if __name__ == "__main__":
    main()
