# SPDX-License-Identifier: Apache-2.0
"""Su et al., figure 8: the number of samples of the clients of Synthetic(1, 1).

The sizes are 50 + lognormal(4, 2), rounded down, as in the FedProx data set that the paper uses.
The figure is a histogram; no model is trained.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from fastagg_sim.config import Config
from fastagg_sim.experiments._adversarial import NUM_CLIENTS, SAMPLE
from fastagg_sim.experiments._base import Claim, Expected, Experiment, Options

CSV = "sizes.csv"
EPSILON = 0.9  # of figures 9 and 10


@dataclass(frozen=True)
class Fig8Options(Options):
    """Figure 8 of Su et al.: client sizes of Synthetic(1, 1)."""


def configs(options: Fig8Options) -> Mapping[str, Config]:
    return {}


def prepare(folders: Mapping[str, Path], options: Fig8Options) -> Sequence[Path]:
    """Write sizes.csv, the number of training samples per seed and client."""
    from fastagg_sim import data
    from fastagg_sim.files import write_atomically

    lines = ["seed,client,samples"]
    for seed in options.chosen_seeds():
        clients = data.load("synthetic", seed=seed, num_clients=NUM_CLIENTS).clients
        assert clients is not None  # synthetic data are divided among clients
        lines += [f"{seed},{client},{len(ids)}" for client, ids in enumerate(clients)]
    path = folders[""] / CSV
    write_atomically(path, "\n".join(lines) + "\n")
    return [path]


def draw(folders: Mapping[str, Path], options: Fig8Options, target: Path) -> None:
    """Draw the histogram of the first seed."""
    from matplotlib import pyplot as plt

    from fastagg_sim.looks import set_title
    from fastagg_sim.plots import save, seeds_note

    sizes = read_sizes(folders[""] / CSV)[options.chosen_seeds()[0]]
    figure, panel = plt.subplots(figsize=(5.0, 3.4), layout="constrained")
    panel.hist(sizes, bins=50, color="#0072B2")
    panel.set_xlabel("data volume of a client")
    panel.set_ylabel("number of clients")
    set_title(panel, f"{seeds_note(1)}: {options.chosen_seeds()[0]}")
    save(figure, target)


def read_sizes(path: Path) -> dict[int, list[int]]:
    """Return the number of training samples of every client, by seed."""
    found: dict[int, list[int]] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(int(row["seed"]), []).append(int(row["samples"]))
    return found


def claims(folders: Mapping[str, Path], options: Fig8Options) -> Sequence[Claim]:
    found = []
    for seed, sizes in read_sizes(folders[""] / CSV).items():
        top = sum(sorted(sizes)[-NUM_CLIENTS // 10 :]) / sum(sizes)
        cap = EPSILON * SAMPLE * fmean(sizes)
        found += [
            Claim.counted(
                f"seed {seed}: a tenth of the clients has more than half of the samples",
                top > 0.5,
                {
                    "part of the largest tenth": round(top, 3),
                    "median": median(sizes),
                    "mean": round(fmean(sizes), 1),
                    "largest": max(sizes),
                },
            ),
            Claim.counted(
                f"seed {seed}: the largest client is above the budget at epsilon = {EPSILON:g}",
                max(sizes) > cap,
                {"largest": max(sizes), "budget": round(cap)},
            ),
        ]
    return found


EXPERIMENT = Experiment(
    name="adversarial-fig8",
    title="client sizes of Synthetic(1, 1)",
    options=Fig8Options,
    configs=configs,
    claims=claims,
    prepare=prepare,
    draw=draw,
    expected=Expected(cpu=0.1, quick=0.1),
    paper="Su et al.",
    figure="8",
    unused=("rounds", "eval_every", "workers", "device"),
)
