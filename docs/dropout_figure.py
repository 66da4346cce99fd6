# SPDX-License-Identifier: Apache-2.0
"""Draw docs/dropout.png: the active clients of each round, for each dropout process.

Run from the root of the repository: python docs/dropout_figure.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch

from fastagg_sim.dropout import make_dropout
from fastagg_sim.looks import set_title

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CLIENTS = 30
ROUNDS = 100
GROUPS = [client // 6 for client in range(CLIENTS)]
# Each group of six holds two labels.
COUNTS = [[50 * (label // 2 == group) for label in range(10)] for group in GROUPS]
PANELS = [
    ("exact", {"alpha": 0.7}),
    ("cluster-floor", {"alpha": 0.7}),
    ("bernoulli", {"p": 0.1, "levels": 5}),
    ("time-varying", {"fraction": 0.3}),
    ("round-robin", {"tau_max": 20}),
    ("round-robin", {"tau_max": 20, "phase": "random"}),
    ("markov", {"rate": 0.3, "memory": 0.9}),
    ("label-correlated", {"low": 0.05, "high": 0.6}),
    ("label-correlated", {"pattern": "cycle", "low": 0.0, "high": 0.9, "period": 50}),
    ("sampled", {"sample": 15, "process": "markov", "options": {"rate": 0.6, "memory": 0.9}}),
    ("adversarial", {"candidates": list(range(20, 30)), "epsilon": 0.8}),
    ("adversarial", {"candidates": "all", "epsilon": 0.8}),
]


def raster(name: str, options: dict[str, object]) -> torch.Tensor:
    """Return which clients are active in each round: bool [CLIENTS, ROUNDS]."""
    process = make_dropout(
        name, num_clients=CLIENTS, seed=3, groups=GROUPS, label_counts=COUNTS, **options
    )
    active = torch.zeros(CLIENTS, ROUNDS, dtype=torch.bool)
    for t in range(ROUNDS):
        active[process.active(t), t] = True
    return active


def title(name: str, options: dict[str, object]) -> str:
    values = {"candidates": "20 ... 29"} if options.get("candidates") != "all" else {}
    shown = {key: values.get(key, value) for key, value in options.items() if key != "options"}
    return name + "\n" + ", ".join(f"{key} = {value}" for key, value in shown.items())


def main() -> None:
    figure, axes = plt.subplots(4, 3, figsize=(12, 9.5), sharex=True, sharey=True)
    for panel, (name, options) in zip(axes.flat, PANELS, strict=True):
        active = raster(name, options)
        panel.imshow(active, aspect="auto", cmap="Greys", interpolation="nearest", vmax=1.4)
        rate = float(active.double().mean())
        set_title(panel, f"{title(name, options)}, active = {rate:.0%}", size=8)
        panel.set_yticks([0, 10, 20, 29])
    for panel in axes[-1]:
        panel.set_xlabel("round")
    for panel in axes[:, 0]:
        panel.set_ylabel("client")
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("dropout.png"), dpi=80)


if __name__ == "__main__":
    main()
