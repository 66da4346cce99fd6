# SPDX-License-Identifier: Apache-2.0
"""Rounds with attackers, under many rules at once."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fastagg
from benchmarks.attacks.setting import (
    AGE,
    ANSWERING,
    BATCH,
    EVALUATED,
    INPUTS,
    RATE,
    SHARE,
    STEPS,
    TASKS,
    D,
    K,
    Made,
    Result,
    S,
)
from fastagg import Aggregator, RuleName
from fastagg_sim.data import load
from fastagg_sim.partition.clustered import clustered
from fastagg_sim.partition.dirichlet import dirichlet
from fastagg_sim.seeds import generator


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
