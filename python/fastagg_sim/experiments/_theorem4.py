# SPDX-License-Identifier: Apache-2.0
"""The hard instances of Su et al., theorem 4 (appendix D), and the error of every rule on them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from torch import Tensor

import fastagg
from fastagg_sim.config import ConfigError
from fastagg_sim.files import write_atomically
from fastagg_sim.looks import LOOKS, set_title
from fastagg_sim.plots import save, seeds_note
from fastagg_sim.seeds import generator

NUM_CLIENTS = 20  # M; all clients are sampled; epsilon M must be a whole number
DIMENSION = 50
SMOOTHNESS = 1.0  # L
SPREAD = 1.0  # G, and sigma
RATE = 0.3  # learning rate; in "noise, uniform" it is RATE / (1 + RATE t) in round t = 0, 1, ...
EQUAL = 0.01  # relative difference of errors that a figure does not show
MIDPOINT = "midpoint"
PARTS = ("heterogeneity", "noise", "noise, uniform")
# Label -> (name, required options) of every rule. With "reuse" a robust rule uses the remembered
# rows of absent clients.
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "amplified": ("amplified", {"beta": 1.0}),
    "stale": ("stale", {}),
    "stale-models": ("stale-models", {}),
    "mifa": ("mifa", {}),
    "mimic": ("mimic", {}),
    "mimic-aged": ("mimic-aged", {}),
    "fedvarp": ("fedvarp", {}),
    "fedau": ("fedau", {}),
    "fedstale": ("fedstale", {}),
    "scaffold": ("scaffold", {"local_work": RATE}),
    "fdms": ("fdms", {}),
    "fdms-means": ("fdms-means", {}),
    "fdms-soft": ("fdms-soft", {}),
    "krum": ("krum", {"num_byzantine": 1}),
    "multi-krum": ("multi-krum", {"num_byzantine": 1}),
    "nnm": ("nnm", {"num_byzantine": 1}),
    "geometric-median": ("geometric-median", {}),
    "centered-clip": ("centered-clip", {"tau": 10.0}),
    "bucketing": ("bucketing", {}),
    "median": ("median", {}),
    "trimmed-mean": ("trimmed-mean", {"num_byzantine": 1}),
    "meamed": ("meamed", {"num_byzantine": 1}),
    "bulyan": ("bulyan", {"num_byzantine": 1}),
    "geometric-median, reuse": ("geometric-median", {"reuse": True}),
    "centered-clip, reuse": ("centered-clip", {"tau": 10.0, "reuse": True}),
    "bucketing, reuse": ("bucketing", {"reuse": True}),
}


@dataclass(frozen=True)
class Row:
    """The result of one rule on one part.

    errors: |grad F|^2 under instances 1 and 2.
    same: whether the final models of the two instances have the same bits.
    """

    part: str
    epsilon: float
    rule: str
    seed: int
    errors: tuple[float, float]
    same: bool

    @property
    def worst(self) -> float:
        return max(self.errors)

    @property
    def bound(self) -> float:
        return bound(self.epsilon)

    @property
    def ratio(self) -> float:
        return self.worst / self.bound


def bound(epsilon: float) -> float:
    """Return the minimax bound on |grad F|^2 (eq. 40), with G = sigma = SPREAD."""
    return epsilon * SPREAD**2 / (4.0 * (1.0 - epsilon))


def hard_direction(epsilon: float, seed: int) -> Tensor:
    """Return u = grad g - grad f, float64 [d], with the largest norm that G (or sigma) allows."""
    u = torch.randn(DIMENSION, generator=generator(seed, "theorem4", "u"), dtype=torch.float64)
    return u / u.norm() * SPREAD / (epsilon * (1.0 - epsilon)) ** 0.5


def errors(x: Tensor, u: Tensor, epsilon: float) -> tuple[float, float]:
    """Return |grad F_1(x)|^2 and |grad F_2(x)|^2 for x [d].

    The gradients are grad F_1(x) = L x and grad F_2(x) = L x + epsilon u.
    """
    gradient = SMOOTHNESS * x.double()
    return float(gradient.square().sum()), float((gradient + epsilon * u).square().sum())


def midpoint(u: Tensor, epsilon: float) -> Tensor:
    """Return the model [d] with equal errors under both instances, which attains the bound."""
    return -epsilon * u / (2.0 * SMOOTHNESS)


def run(part: str, instance: int, rule: str, epsilon: float, seed: int, rounds: int) -> Tensor:
    """Train on one instance (1 or 2) of one part from a random start; return the model [d]."""
    u = hard_direction(epsilon, seed)
    name, options = RULES[rule]
    server = fastagg.make(
        fastagg.RuleName(name), num_clients=NUM_CLIENTS, num_params=DIMENSION, **options
    )
    x = torch.randn(DIMENSION, generator=generator(seed, "theorem4", "start"))
    bad = round(epsilon * NUM_CLIENTS)
    for t in range(rounds):
        rng = generator(seed, "theorem4", part if part == "heterogeneity" else "noise", t)
        order = torch.randperm(NUM_CLIENTS, generator=rng)
        with_g = range(NUM_CLIENTS - bad, NUM_CLIENTS) if part == PARTS[0] else order[:bad].tolist()
        silenced, rate = set(with_g), RATE
        if part == "noise, uniform":  # silenced independently of which clients have g
            silenced = set(torch.randperm(NUM_CLIENTS, generator=rng)[:bad].tolist())
            rate = RATE / (1.0 + RATE * t)
        active = [client for client in range(NUM_CLIENTS) if client not in silenced]
        updates = []
        for client in active:
            gradient = SMOOTHNESS * x
            if instance == 2 and client in with_g:
                gradient = gradient + u.float()
            if isinstance(server, fastagg.Scaffold):
                gradient = gradient + server.control(client)
            updates.append(-rate * gradient)
        if isinstance(server, fastagg.Scaffold):
            server.local_work = rate
        server.step(x, updates, active)
    return x


def check_epsilons(epsilons: Sequence[float]) -> None:
    """Raise ConfigError if an epsilon is not a multiple of 1 / NUM_CLIENTS in (0, 1)."""
    for epsilon in epsilons:
        count = epsilon * NUM_CLIENTS
        if not 0 < epsilon < 1 or abs(count - round(count)) > 1e-9:  # a NaN cannot be rounded
            raise ConfigError(
                f"--epsilons: expected multiples of 1/{NUM_CLIENTS} in (0, 1), got {epsilon}"
            )


def measure(epsilons: Sequence[float], seeds: Sequence[int], rounds: int) -> list[Row]:
    """Measure every rule on the first two parts, FedAvg on the third, and the midpoint.

    Raises ConfigError as `check_epsilons` does.
    """
    check_epsilons(epsilons)
    rows = []
    runs = list(product(epsilons, seeds, PARTS))
    for epsilon, seed, part in track(runs, "theorem 4", console=Console(stderr=True)):
        u = hard_direction(epsilon, seed)
        for rule in RULES if part != "noise, uniform" else ("fedavg",):
            first, second = (
                run(part, instance, rule, epsilon, seed, rounds) for instance in (1, 2)
            )
            found = (errors(first, u, epsilon)[0], errors(second, u, epsilon)[1])
            same = torch.equal(first, second)
            rows.append(Row(part, epsilon, rule, seed, found, same))
        if part != "noise, uniform":
            found = errors(midpoint(u, epsilon), u, epsilon)
            rows.append(Row(part, epsilon, MIDPOINT, seed, found, True))
    return rows


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write the results to a CSV file that `read_rows` can read."""
    lines = ["part,epsilon,rule,seed,error_1,error_2,bound,ratio,same"]
    for r in rows:
        numbers = ",".join(f"{value:.9g}" for value in (*r.errors, r.bound, r.ratio))
        lines.append(f'"{r.part}",{r.epsilon:g},"{r.rule}",{r.seed},{numbers},{int(r.same)}')
    write_atomically(path, "\n".join(lines) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Read the results in a theorem4.csv."""
    with open(path, newline="", encoding="utf-8") as file:
        return [
            Row(
                row["part"],
                float(row["epsilon"]),
                row["rule"],
                int(row["seed"]),
                (float(row["error_1"]), float(row["error_2"])),
                row["same"] == "1",
            )
            for row in csv.DictReader(file)
        ]


def draw(rows: Sequence[Row], target: Path) -> None:
    """Draw the larger error of the two instances over epsilon: the range over all rules, and the
    bound."""
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 4.0), sharey=True, layout="constrained")
    epsilons = sorted({row.epsilon for row in rows})
    fedavg = LOOKS["fedavg"]
    for panel, part in zip(panels, PARTS[:2], strict=True):
        worst = [
            [r.worst for r in rows if (r.part, r.epsilon) == (part, e) and r.rule != MIDPOINT]
            for e in epsilons
        ]
        low, high = [min(values) for values in worst], [max(values) for values in worst]
        equal = all(b <= (1 + EQUAL) * a for a, b in zip(low, high, strict=True))
        which = f"equal within {100 * EQUAL:g} %" if equal else "the highest"
        label = f"all {len(RULES)} settings of rules,\n{which}"
        panel.plot(epsilons, high, "s-", color="#777777", label=label)
        if not equal:
            label = "band from the lowest of\nthem to the highest"
            panel.fill_between(epsilons, low, high, color="#777777", alpha=0.3, label=label)
        attained = [
            max(r.worst for r in rows if (r.part, r.rule, r.epsilon) == (part, MIDPOINT, e))
            for e in epsilons
        ]
        panel.plot(epsilons, attained, "o", color="black", label=MIDPOINT)
        uniform = [r for r in rows if r.part == "noise, uniform"]
        if part == "noise" and uniform:
            panel.plot(
                epsilons,
                [max(r.worst for r in uniform if r.epsilon == epsilon) for epsilon in epsilons],
                linestyle=fedavg.style,
                color=fedavg.color,
                label="fedavg, silenced uniformly",
            )
        panel.plot(epsilons, [bound(e) for e in epsilons], "k--", label="minimax bound")
        set_title(panel, part)
        panel.set_xlabel("$\\epsilon$")
        panel.set_yscale("log")
        panel.grid(color="#dddddd", linewidth=0.6)
    panels[0].set_ylabel("larger $|\\nabla F|^2$ of the two instances")
    count = len({row.seed for row in rows})
    panels[1].legend(
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        title=f"n = {count} seeds, the highest of them" if count > 1 else seeds_note(1),
        title_fontsize=8,
    )
    save(figure, target)
