# SPDX-License-Identifier: Apache-2.0
"""``attacks``: clients that lie, under every rule, and what the defences change.

Three tables, each with claims that are judged by the rule of ``fastagg_sim.verdicts``:

* **Hijack.** One client sends back the model's last change. The weight of its row in `fdms`,
  `fdms-soft` and `fdms-means`, with and without ``max_share``; K = 20, S = 5, it is active in every
  round.
* **Poison once.** One client sends one poisoned row and stays away. The distance of the model from
  that of a run without the poison after 1000 rounds, in norms of the poisoned row.
* **Accuracy.** Ten attacks by 5 to 40 % of 20 clients, 10 of them active, on two tasks: MNIST in
  five groups of clients, and Fashion-MNIST with Dirichlet proportions. The model is a softmax
  regression on images of 14 x 14. Attackers know the rows of the honest clients of the round.

Clients of all rules train together in one batched product, with the same samples and the same
absences, so that rules differ in nothing else. Finished parts are read from ``attacks.csv``.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn import functional

import fastagg
from fastagg import Aggregator, RuleName
from fastagg_sim.data import load
from fastagg_sim.partition.clustered import clustered
from fastagg_sim.partition.dirichlet import dirichlet
from fastagg_sim.seeds import generator
from fastagg_sim.verdicts import Estimate, Statement, judge, over_seeds

K, S, SIDE = 20, 10, 14
INPUTS = SIDE * SIDE + 1
D = INPUTS * 10
STEPS, BATCH, RATE = 5, 20, 0.1
WORK = STEPS * RATE
ROUNDS, SEEDS = 50, (0, 1, 2)
EVALUATED = 5  # the last rounds of which the accuracy is the mean
TASKS = ("clustered MNIST", "Dirichlet Fashion-MNIST")
FRACTIONS = (0.05, 0.1, 0.2, 0.4)
SHARE, AGE = 0.2, 10  # max_share and max_age in the tables

ATTACKS = {
    "none": "all clients are honest",
    "hijack": "send the model's last change; in the second half, minus the own update",
    "poison once": "send minus 100 times the own update once, then stay away",
    "sybils": "all attackers send minus the mean of the honest rows, the same bits",
    "scaled": "send minus 10 times the own update",
    "sign-flipped": "send minus the own update",
    "ALIE": "send the mean minus 1.5 standard deviations of the honest rows, in every column",
    "inner product": "send minus twice the mean of the honest rows",
    "mimic": "send a copy of the row of the honest client with the lowest id",
    "late": "send the update for the model of ten rounds ago",
    "silent": "be active in every tenth round only, then send minus the own update",
}
ANSWERING = ("poison once", "silent")  # attackers decide when they are active

Made = tuple[str, str, dict[str, Any]]


def configurations(byzantine: int) -> list[Made]:
    """Return (label, rule, options); robust rules expect ``byzantine`` attackers among S."""
    f = {"num_byzantine": byzantine}
    averaging: list[Made] = [
        ("fedavg", "fedavg", {}),
        ("amplified", "amplified", {"beta": K / S}),
        ("fedau", "fedau", {}),
        ("fdms", "fdms", {}),
        ("fdms, max_share", "fdms", {"max_share": SHARE}),
        ("fdms-soft", "fdms-soft", {}),
        ("fdms-soft, max_share", "fdms-soft", {"max_share": SHARE}),
        ("fdms-means", "fdms-means", {}),
        ("fdms-means, max_share", "fdms-means", {"max_share": SHARE}),
        ("scaffold", "scaffold", {"local_work": WORK}),
    ]
    for name in ("mifa", "stale", "stale-models", "fedvarp", "mimic", "mimic-aged"):
        averaging.append((name, name, {}))
        averaging.append((f"{name}, max_age", name, {"max_age": AGE}))
    bounded: list[Made] = [
        (f"{label}, max_norm", rule, {**options, "max_norm": "adaptive"})
        for label, rule, options in averaging
        if label in ("fedavg", "fdms", "mifa", "mimic", "scaffold")
    ]
    robust: list[Made] = [
        ("geometric-median", "geometric-median", {}),
        ("geometric-median, reuse", "geometric-median", {"reuse": True}),
        ("geometric-median, reuse, max_age", "geometric-median", {"reuse": True, "max_age": AGE}),
        ("centered-clip", "centered-clip", {"tau": 0.2}),
        ("krum", "krum", f),
        ("multi-krum", "multi-krum", f),
        ("nnm", "nnm", f),
        ("bucketing", "bucketing", {}),
        ("median", "median", {}),
        ("trimmed-mean", "trimmed-mean", f),
        ("meamed", "meamed", f),
        # Bulyan needs 4f + 3 of the S rows.
        ("bulyan", "bulyan", {"num_byzantine": min(byzantine, (S - 3) // 4)}),
    ]
    return [*averaging, *bounded, *robust]


@dataclass(frozen=True)
class Result:
    """One number of a run.

    Attributes:
        table: "hijack", "poison once" or "accuracy".
        task, attack, fraction, rule, seed: of the run.
        quantity: "accuracy", the mean of the last rounds; "mean weight" and "largest weight" of
            attackers' rows; "refused", rounds in which the step raised an error; "error", in row
            norms.
        value: the number.
    """

    table: str
    task: str
    attack: str
    fraction: float
    rule: str
    seed: int
    quantity: str
    value: float

    @property
    def run(self) -> tuple[object, ...]:
        return astuple(self)[:6]


class Task:
    """Samples of K clients and a softmax regression, whose clients train in one batched product."""

    def __init__(self, name: str, seed: int) -> None:
        data = load("mnist" if "Fashion" not in name else "fmnist", seed=seed)
        rng = generator(seed, "attacks", "partition")
        if name == TASKS[0]:
            parts = clustered(data.train_y, K, rng, num_groups=5, samples_per_client=200)
        else:
            parts = dirichlet(data.train_y, K, rng, alpha=0.3, samples_per_client=500)
        self.seed = seed
        self.samples = [(_inputs(data.train_x[i]), data.train_y[i]) for i in parts.clients]
        self.test_x, self.test_y = _inputs(data.test_x[:2000]), data.test_y[:2000]

    def train(self, starts: Tensor, clients: Sequence[int], t: int, drift: Tensor) -> Tensor:
        """Return the updates [R, S, d] of S clients from R x S models.

        Args:
            starts: [R, S, d].
            clients: S ids, the same for all R.
            t: the round, which decides the order of samples.
            drift: [R, S, d], added to every gradient.
        """
        models, drift = _side_by_side(starts), _side_by_side(drift)
        drawn = []
        for k in clients:
            order = generator(self.seed, "attacks", "batches", t, k)
            drawn.append(torch.randint(len(self.samples[k][1]), (STEPS, BATCH), generator=order))
        for step in range(STEPS):
            pairs = [(self.samples[k], i[step]) for k, i in zip(clients, drawn, strict=True)]
            x = torch.stack([x[i] for (x, _), i in pairs])  # [S, B, inputs]
            y = torch.stack([y[i] for (_, y), i in pairs])
            logits = (x @ models).unflatten(2, (-1, 10))  # [S, B, R, 10]
            slope = torch.softmax(logits, dim=3) - functional.one_hot(y, 10)[:, :, None]
            gradient = x.transpose(1, 2) @ slope.flatten(2) / BATCH
            models -= RATE * (gradient + drift)
        after = models.unflatten(2, (-1, 10)).permute(2, 0, 1, 3)  # [R, S, inputs, 10]
        return after.reshape(starts.shape) - starts

    def accuracy(self, params: Tensor) -> list[float]:
        """Return the test accuracy of R models [R, d]."""
        logits = self.test_x @ params.reshape(-1, INPUTS, 10).nan_to_num()
        return [float(x) for x in (logits.argmax(2) == self.test_y).double().mean(1)]


def _side_by_side(models: Tensor) -> Tensor:
    """Return models [R, S, d] as matrices of S clients: [S, inputs, 10 R]."""
    return models.unflatten(2, (INPUTS, 10)).permute(1, 2, 0, 3).flatten(2).clone()


def _inputs(images: Tensor) -> Tensor:
    pooled = functional.avg_pool2d(images, 2).flatten(1)
    return torch.cat([pooled, torch.ones(len(pooled), 1)], dim=1)


@dataclass
class Server:
    """One rule with its model, and what its steps did with the rows of attackers."""

    label: str
    agg: Aggregator
    params: Tensor
    weights: list[float]
    refused: int = 0

    def step(self, rows: Tensor, clients: list[int], attackers: set[int]) -> None:
        try:
            report = self.agg.step(self.params, rows, clients)
        except ValueError:
            self.refused += 1
            return
        used = zip(report.active.tolist(), report.weights.tolist(), strict=True)
        taken = {k: weight for k, weight in used if k in attackers}
        self.weights += [taken.get(k, 0.0) for k in clients if k in attackers]

    def drift(self, clients: Sequence[int]) -> Tensor:
        """Return what the clients add to their gradients: [S, d]."""
        if isinstance(self.agg, fastagg.Scaffold):
            return torch.stack([self.agg.control(k) for k in clients])
        return torch.zeros(len(clients), D)


def _make(name: str, options: dict[str, Any]) -> Aggregator:
    more = {"nonfinite": "drop", "max_norm": None, **options}
    return fastagg.make(RuleName(name), num_clients=K, num_params=D, **more)


def serve(made: Iterable[Made]) -> list[Server]:
    return [
        Server(
            label,
            _make(name, options),
            torch.zeros(D),
            [],
        )
        for label, name, options in made
    ]


def active_clients(attack: str, attackers: list[int], t: int, seed: int, size: int) -> list[int]:
    """Return the active clients of round t, ascending."""
    rng = generator(seed, "attacks", "active", t)
    answering = attack not in ANSWERING or t == (0 if attack == "poison once" else t - t % 10)
    order = torch.randperm(K, generator=rng).tolist()
    if attack in ANSWERING:
        honest = [k for k in order if k not in attackers]
        own = attackers if answering else []
        return sorted([*own, *honest[: size - len(own)]])
    return sorted(order[:size])


def lies(
    attack: str, rows: Tensor, bad: list[int], t: int, rounds: int, last_changes: Tensor
) -> Tensor:
    """Return the rows [R, S, d] after the attackers replaced theirs.

    Args:
        attack: one of ``ATTACKS``.
        rows: the honest updates [R, S, d].
        bad: positions of the attackers.
        t: the round, in [0, rounds).
        rounds: the number of rounds.
        last_changes: [R, d], what the models changed in the last round.
    """
    if not bad or attack in ("none", "late"):
        return rows
    lying, honest = rows.clone(), [i for i in range(rows.shape[1]) if i not in bad]
    known = rows[:, honest] if honest else rows
    mean = known.mean(1, keepdim=True)
    if attack == "hijack" and 2 * t < rounds:
        lying[:, bad] = last_changes[:, None]
    elif attack == "poison once":
        lying[:, bad] *= -100.0
    elif attack == "sybils":
        lying[:, bad] = -mean
    elif attack == "scaled":
        lying[:, bad] *= -10.0
    elif attack == "ALIE":
        lying[:, bad] = mean - 1.5 * known.std(1, unbiased=False, keepdim=True)
    elif attack == "inner product":
        lying[:, bad] = -2.0 * mean
    elif attack == "mimic":
        lying[:, bad] = known[:, :1]
    else:
        lying[:, bad] *= -1.0
    return lying


def attacked_runs(
    task: Task, attack: str, fraction: float, made: list[Made], rounds: int
) -> tuple[list[Server], list[float]]:
    """Run all servers through the same rounds; return them and their accuracies at the end."""
    servers, seed = serve(made), task.seed
    count = round(fraction * K)
    chosen = torch.randperm(K, generator=generator(seed, "attacks", "attackers"))[:count]
    attackers = sorted(chosen.tolist())
    history = [torch.stack([server.params for server in servers])]
    for t in range(rounds):
        clients = active_clients(attack, attackers, t, seed, S)
        bad = [i for i, k in enumerate(clients) if k in attackers]
        starts = history[-1][:, None].repeat(1, len(clients), 1)
        if attack == "late":
            starts[:, bad] = history[-min(len(history), 11)][:, None]
        drift = torch.stack([server.drift(clients) for server in servers])
        rows = task.train(starts, clients, t, drift)
        change = history[-1] - history[-2] if t else torch.zeros_like(history[-1])
        rows = lies(attack, rows, bad, t, rounds, change)
        for server, own in zip(servers, rows, strict=True):
            server.step(own, clients, set(attackers))
        history = [*history[-10:], torch.stack([server.params for server in servers])]
    last = [task.accuracy(models) for models in history[-EVALUATED:]]
    return servers, [statistics.fmean(values) for values in zip(*last, strict=True)]


def accuracy_results(
    task_name: str, seed: int, attack: str, fraction: float, made: list[Made], rounds: int,
    task: Task,
) -> list[Result]:  # fmt: skip
    servers, accuracies = attacked_runs(task, attack, fraction, made, rounds)
    results = []
    for server, accuracy in zip(servers, accuracies, strict=True):
        run = ("accuracy", task_name, attack, fraction, server.label, seed)
        results.append(Result(*run, "accuracy", accuracy))
        results.append(Result(*run, "refused", float(server.refused)))
        if server.weights:
            results.append(Result(*run, "mean weight", statistics.fmean(server.weights)))
            results.append(Result(*run, "largest weight", max(server.weights)))
    return results


# --- hijack ----------------------------------------------------------------------------------

HIJACKED: list[Made] = [
    ("fdms", "fdms", {}),
    ("fdms, max_share", "fdms", {"max_share": SHARE}),
    ("fdms-soft", "fdms-soft", {}),
    ("fdms-soft, max_share", "fdms-soft", {"max_share": SHARE}),
    ("fdms-means", "fdms-means", {}),
    ("fdms-means, max_share", "fdms-means", {"max_share": SHARE}),
]
HIJACK_SEEDS = range(5)


def hijack_results(seed: int, made: list[Made], rounds: int = 60) -> list[Result]:
    """Return weights of a client that is always active and sends back the model's last change."""
    task, few = Task(TASKS[0], seed), 5
    attacker = int(torch.randint(K, (), generator=generator(seed, "attacks", "attackers")))
    results = []
    for lying in (True, False):
        servers = serve(made)
        before = torch.zeros(len(servers), D)
        for t in range(rounds):
            order = torch.randperm(K, generator=generator(seed, "attacks", "active", t)).tolist()
            clients = sorted([attacker, *[k for k in order if k != attacker][: few - 1]])
            models = torch.stack([server.params for server in servers])
            starts = models[:, None].repeat(1, few, 1)
            rows = task.train(starts, clients, t, torch.zeros_like(starts))
            if lying and t:
                rows[:, clients.index(attacker)] = models - before
            before = models
            for server, own in zip(servers, rows, strict=True):
                server.step(own, clients, {attacker})
        for server in servers:
            after = server.weights[20:]  # 20 rounds of preparation
            attack = "hijack" if lying else "none"
            run = ("hijack", TASKS[0], attack, 1 / K, server.label, seed)
            results.append(Result(*run, "mean weight", statistics.fmean(after)))
            results.append(Result(*run, "largest weight", max(after)))
    return results


# --- poison once -----------------------------------------------------------------------------

POISONED: list[Made] = [
    (f"{name}{', max_age' if age else ''}", name, {"max_age": age} if age else {})
    for name in ("mifa", "stale", "fedvarp", "mimic", "mimic-aged")
    for age in (None, AGE)
]
POISON_SEEDS = range(5)


def poison_results(seed: int, rounds: int = 1000) -> list[Result]:
    """Return how far one poisoned row moves a model from that of a twin without it."""
    results, width = [], 50
    for label, name, options in POISONED:
        rule = RuleName(name)
        pair = [fastagg.make(rule, num_clients=K, num_params=width, **options) for _ in range(2)]
        params = [torch.zeros(width), torch.zeros(width)]
        poison = torch.randn(width, generator=generator(seed, "attacks", "poison"))
        for t in range(rounds):
            rng = generator(seed, "attacks", "rows", t)
            clients = list(range(K))
            if t:
                clients = sorted((1 + torch.randperm(K - 1, generator=rng)[:S]).tolist())
            rows = 0.01 * torch.randn(len(clients), width, generator=rng)
            for agg, own, poisoned in zip(pair, params, (True, False), strict=True):
                sent = rows.clone()
                if poisoned and t == 0:
                    sent[0] += poison
                agg.step(own, sent, clients)
        error = float((params[0] - params[1]).norm() / poison.norm())
        results.append(Result("poison once", "random rows", "poison once", 1 / K, label, seed,
                              "error", error))  # fmt: skip
    return results


# --- claims ----------------------------------------------------------------------------------


class Results:
    """Values over seeds, by table, task, attack, fraction, rule and quantity."""

    def __init__(self, rows: Iterable[Result]) -> None:
        self.values: dict[tuple[object, ...], dict[int, float]] = {}
        for row in rows:
            key = (row.table, row.task, row.attack, row.fraction, row.rule, row.quantity)
            self.values.setdefault(key, {})[row.seed] = row.value

    def over(self, *key: object) -> dict[int, float]:
        return self.values.get(key, {})

    def estimate(self, *key: object) -> Estimate:
        return _estimate(list(self.over(*key).values()))

    def difference(self, first: tuple[object, ...], second: tuple[object, ...]) -> Estimate:
        """Return first - second, in pairs of runs with the same seed."""
        a, b = self.over(*first), self.over(*second)
        return _estimate([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])


def _estimate(values: list[float]) -> Estimate:
    if len(values) >= 2:
        return over_seeds(values)
    return Estimate(values[0] if values else math.nan, None, 0, len(values))


@dataclass(frozen=True)
class Claim:
    """A statement about the tables and what the numbers say about it."""

    text: str
    statements: list[Statement]

    @property
    def known(self) -> bool:
        return not any(math.isnan(s.estimate.value) for s in self.statements)


def claims(results: Results) -> list[Claim]:
    one, mnist = 1 / K, TASKS[0]

    def weight(attack: str, rule: str, quantity: str) -> Estimate:
        return results.estimate("hijack", mnist, attack, one, rule, quantity)

    def error(rule: str) -> Estimate:
        return results.estimate("poison once", "random rows", "poison once", one, rule, "error")

    def run(task: str, attack: str, fraction: float, rule: str) -> tuple[object, ...]:
        return "accuracy", task, attack, fraction, rule, "accuracy"

    def gain(
        attack: str, fraction: float, better: str, worse: str, margin: float
    ) -> list[Statement]:
        return [
            Statement(
                task,
                results.difference(
                    run(task, attack, fraction, better), run(task, attack, fraction, worse)
                ),
                low=margin,
            )
            for task in TASKS
        ]

    def cost(rule: str, plain: str, margin: float) -> list[Statement]:
        return gain("none", 0.0, rule, plain, -margin)

    def survives(rule: str, attack: str, fraction: float, margin: float) -> list[Statement]:
        return [
            Statement(
                task,
                results.difference(run(task, attack, fraction, rule), run(task, "none", 0.0, rule)),
                low=-margin,
            )
            for task in TASKS
        ]

    found = [
        Claim(
            "hijack: without a cap, the liar's mean weight in fdms is above 0.4 (fair: 0.2)",
            [Statement("fdms", weight("hijack", "fdms", "mean weight"), low=0.4)],
        ),
        Claim(
            f"hijack: with max_share = {SHARE} the largest weight is at most {SHARE}",
            [
                Statement(rule, weight("hijack", rule, "largest weight"), high=SHARE + 1e-6)
                for rule in ("fdms, max_share", "fdms-soft, max_share", "fdms-means, max_share")
            ],
        ),
        Claim(
            "max_share costs less than 0.01 of accuracy without attackers",
            cost("fdms, max_share", "fdms", 0.01) + cost("fdms-soft, max_share", "fdms-soft", 0.01),
        ),
        Claim(
            "hijack by 10 %: max_share gains more than 0.02 of accuracy",
            gain("hijack", 0.1, "fdms, max_share", "fdms", 0.02),
        ),
    ]
    bounds = {
        "mifa": (45.0, math.inf), "mimic": (30.0, math.inf), "mimic-aged": (-math.inf, 2.0),
        "mifa, max_age": (-math.inf, 1.0), "stale, max_age": (-math.inf, 1.0),
        "fedvarp, max_age": (-math.inf, 1.0), "mimic, max_age": (30.0, math.inf),
    }  # fmt: skip
    for rule, (low, high) in bounds.items():
        side = f"more than {low:g}" if high == math.inf else f"less than {high:g}"
        found.append(
            Claim(
                f"poison once: after 1000 rounds {rule} is off by {side} row norms",
                [Statement(rule, error(rule), low, high)],
            )
        )
    return [
        *found,
        Claim(
            "max_age costs mifa less than 0.02 of accuracy without attackers",
            cost("mifa, max_age", "mifa", 0.02),
        ),
        Claim(
            "poison once by 20 %: max_age gains mifa more than 0.1 of accuracy",
            gain("poison once", 0.2, "mifa, max_age", "mifa", 0.1),
        ),
        Claim(
            "scaled rows by 20 %: fedavg loses more than 0.1 against max_norm = adaptive",
            gain("scaled", 0.2, "fedavg, max_norm", "fedavg", 0.1),
        ),
        Claim(
            "max_norm = adaptive costs fedavg less than 0.01 of accuracy without attackers",
            cost("fedavg, max_norm", "fedavg", 0.01),
        ),
        Claim(
            "scaled rows by 20 %: geometric-median loses less than 0.05",
            survives("geometric-median", "scaled", 0.2, 0.05),
        ),
        Claim(
            "ALIE by 20 %: geometric-median loses less than 0.05",
            survives("geometric-median", "ALIE", 0.2, 0.05),
        ),
    ]


# --- output ----------------------------------------------------------------------------------


def markdown(rows: Sequence[Result], rounds: int) -> str:
    """Return the tables and claims."""
    results, lines = Results(rows), list[str]()
    lines += ["## Claims", "", "| claim | numbers, with 95 % intervals over seeds | verdict |",
              "| --- | --- | --- |"]  # fmt: skip
    for claim in claims(results):
        numbers = "; ".join(f"{s.name}: {s.estimate}" for s in claim.statements)
        lines.append(
            f"| {claim.text} | {numbers} | {judge(claim.statements)} |"
            if claim.known
            else f"| {claim.text} | not run | not run |"
        )
    lines += ["", "## Hijack", "", *hijack_table(results)]
    lines += ["", "## Poison once", "", *poison_table(results)]
    labels = [label for label, *_ in configurations(1)]
    for task in TASKS:
        for fraction in FRACTIONS:
            lines += ["", f"## Accuracy: {task}, {fraction:.0%} attackers", ""]
            runs = {row.run for row in rows if (row.task, row.fraction) == (task, fraction)}
            if not any(run[0] == "accuracy" for run in runs):
                lines.append("Not run.")
                continue
            seeds: dict[str, set[object]] = {}
            for _, _, attack, _, _, seed in (run for run in runs if run[0] == "accuracy"):
                seeds.setdefault(str(attack), set()).add(seed)
            counts = sorted({len(found) for found in seeds.values()})
            number = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
            lines += [f"Means of {number} seeds, after {rounds} rounds.", ""]
            lines.append(f"| rule | {' | '.join(ATTACKS)} |")
            lines.append(f"| --- |{' --- |' * len(ATTACKS)}")
            for label in labels:
                cells = []
                for attack in ATTACKS:
                    part = 0.0 if attack == "none" else fraction
                    key = ("accuracy", task, attack, part, label)
                    values = results.over(*key, "accuracy").values()
                    refused = sum(results.over(*key, "refused").values())
                    cell = f"{statistics.fmean(values):.3f}" if values else ""
                    cells.append(cell + (f" ({refused:.0f} refused)" if refused else ""))
                if any(cells):
                    lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def hijack_table(results: Results) -> list[str]:
    lines = ["| rule | sender | mean weight | largest weight |", "| --- | --- | --- | --- |"]
    for label, *_ in HIJACKED:
        for attack, who in (("none", "honest"), ("hijack", "the last change")):
            key = ("hijack", TASKS[0], attack, 1 / K, label)
            means = list(results.over(*key, "mean weight").values())
            largest = results.over(*key, "largest weight").values()
            if means:
                lines.append(
                    f"| `{label}` | {who} | {min(means):.2f} to {max(means):.2f} "
                    f"| {max(largest):.2f} |"
                )
    return lines


def poison_table(results: Results) -> list[str]:
    lines = ["| rule | error after 1000 rounds, row norms |", "| --- | --- |"]
    for label, *_ in POISONED:
        found = results.over("poison once", "random rows", "poison once", 1 / K, label, "error")
        if found:
            lines.append(f"| `{label}` | {statistics.fmean(found.values()):.3g} |")
    return lines


SHOWN = (
    *(
        "fedavg",
        "fedavg, max_norm",
        "fdms",
        "fdms, max_share",
        "fdms, max_norm",
        "fdms-means",
        "mifa",
    ),
    *("mifa, max_age", "mifa, max_norm", "mimic", "mimic, max_norm", "mimic-aged", "scaffold"),
    *("scaffold, max_norm", "geometric-median", "geometric-median, reuse", "centered-clip"),
    *("krum", "multi-krum", "nnm", "bucketing", "median", "trimmed-mean", "meamed", "bulyan"),
)
"""Rules in the table of docs/security.md."""


def accuracy_table(results: Results, fraction: float) -> list[str]:
    """Return the table of docs/security.md: accuracy in percent on both tasks."""
    lines = [f"| rule | {' | '.join(ATTACKS)} |", f"| --- |{' --- |' * len(ATTACKS)}"]
    for label in SHOWN:
        cells = [
            _percent(results, attack, 0.0 if attack == "none" else fraction, label)
            for attack in ATTACKS
        ]
        lines.append(f"| `{label}` | {' | '.join(cells)} |")
    return lines


SHOWN_FOR_FRACTIONS = ("fedavg", "fedavg, max_norm", "mifa, max_norm", "centered-clip", "nnm")
"""Rules in the table of docs/security.md that has all fractions of attackers."""


def fraction_table(results: Results) -> list[str]:
    """Return the table of docs/security.md over the fraction of attackers."""
    fractions = " | ".join(f"{100 * fraction:.0f} %" for fraction in FRACTIONS)
    lines = [f"| rule | attack | {fractions} |", f"| --- | --- |{' --- |' * len(FRACTIONS)}"]
    for label in SHOWN_FOR_FRACTIONS:
        for attack in ("poison once", "sybils", "scaled", "sign-flipped"):
            cells = [_percent(results, attack, part, label) for part in FRACTIONS]
            lines.append(f"| `{label}` | {attack} | {' | '.join(cells)} |")
    return lines


def _percent(results: Results, attack: str, part: float, label: str) -> str:
    """Return the accuracy in percent on both tasks."""
    found = [results.over("accuracy", t, attack, part, label, "accuracy").values() for t in TASKS]
    return " / ".join(
        f"{100 * statistics.fmean(values):.0f}" if values else "?" for values in found
    )


def page(rows: Sequence[Result]) -> str:
    """Return the tables that docs/security.md shows."""
    results = Results(rows)
    tables = (
        *(hijack_table(results), poison_table(results)),
        *(accuracy_table(results, 0.2), fraction_table(results)),
    )
    return "\n\n".join("\n".join(table) for table in tables)


def write(folder: Path, rows: Sequence[Result], rounds: int) -> None:
    """Write attacks.csv and attacks.md."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "attacks.csv.part"
    with temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([field.name for field in fields(Result)])
        table.writerows(astuple(row) for row in rows)
    temporary.replace(folder / "attacks.csv")
    attacks = "\n".join(f"- **{name}**: {text}." for name, text in ATTACKS.items())
    text = (
        "# Clients that lie\n\n`python -m benchmarks attacks`. "
        f"K = {K}, S = {S}, softmax regression with {D} parameters, {STEPS} local steps; "
        f"max_share = {SHARE}, max_age = {AGE}. Robust rules know the expected number of "
        "attackers, in the runs without attackers that of 20 %; bulyan expects 1, the most that "
        "S rows allow. Attacks:\n\n"
        f"{attacks}\n\n{markdown(rows, rounds)}\n"
    )
    (folder / "attacks.md").write_text(text, encoding="utf-8")


def read(path: Path) -> list[Result]:
    """Return the results in a CSV file; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Result(
                row["table"], row["task"], row["attack"], float(row["fraction"]), row["rule"],
                int(row["seed"]), row["quantity"], float(row["value"]),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


# --- the command -----------------------------------------------------------------------------

Part = Callable[[set[tuple[object, ...]]], list[Result]]
"""(runs that are finished) -> results of the others."""


def parts(quick: bool) -> Iterator[Part]:
    """Yield the parts of the benchmark, the short ones first."""

    def hijack(seed: int) -> Part:
        def part(done: set[tuple[object, ...]]) -> list[Result]:
            run = ("hijack", TASKS[0], "hijack", 1 / K)
            made = [one for one in HIJACKED if (*run, one[0], seed) not in done]
            return hijack_results(seed, made, 25 if quick else 60) if made else []

        return part

    def poison(seed: int) -> Part:
        def part(done: set[tuple[object, ...]]) -> list[Result]:
            if any(run[0] == "poison once" and run[-1] == seed for run in done):
                return []
            return poison_results(seed, 50 if quick else 1000)

        return part

    for seed in list(HIJACK_SEEDS)[: 2 if quick else None]:
        yield hijack(seed)
    for seed in list(POISON_SEEDS)[: 2 if quick else None]:
        yield poison(seed)
    for fraction in (0.2,) if quick else (0.2, 0.1, 0.4, 0.05):
        for seed in SEEDS[: 2 if quick else None]:
            for name in TASKS[: 1 if quick else None]:
                yield from _accuracy_parts(name, seed, fraction, 12 if quick else ROUNDS)


def _accuracy_parts(name: str, seed: int, fraction: float, rounds: int) -> Iterator[Part]:
    loaded: list[Task] = []
    for attack in ATTACKS:
        if attack == "none" and fraction != 0.2:
            continue
        rate = 0.0 if attack == "none" else fraction

        def part(
            done: set[tuple[object, ...]], attack: str = attack, rate: float = rate
        ) -> list[Result]:
            made = [
                one
                for one in configurations(max(1, round(rate * S)))
                if ("accuracy", name, attack, rate, one[0], seed) not in done
            ]
            if not made:
                return []
            if not loaded:
                loaded.append(Task(name, seed))
            return accuracy_results(name, seed, attack, rate, made, rounds, loaded[0])

        yield part


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="one task, two seeds and few rounds, under a minute"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help="write attacks.csv and attacks.md; finished parts there are not run again",
    )  # fmt: skip


def run(options: argparse.Namespace, console: Console) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in batched products depend on the number of threads
    try:
        rows = read(options.out / "attacks.csv") if options.out else []
        done: set[tuple[object, ...]] = {row.run for row in rows}
        rounds = 12 if options.quick else ROUNDS
        for part in track(list(parts(options.quick)), "attacks", console=console):
            fresh = part(done)
            rows += fresh
            if fresh and options.out:
                write(options.out, rows, rounds)
        if options.out:
            write(options.out, rows, rounds)
        console.print(markdown(rows, rounds).partition("## Accuracy")[0], markup=False)
        if not options.quick:
            console.print(f"Tables of docs/security.md:\n\n{page(rows)}", markup=False)
    finally:
        torch.set_num_threads(threads)
