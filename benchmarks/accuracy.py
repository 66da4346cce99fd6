# SPDX-License-Identifier: Apache-2.0
"""``accuracy``: errors relative to float64, for the cosine and for every op on d columns.

Columns of the CSV: quantity, rows (their distribution), scale, S, d, by, error, threads. The tables
add a verdict: ``LIMITS`` contains the largest errors that fastagg may have. There is no limit for
denormal rows, which have fewer digits; their errors are only reported.

* Error of the cosine: the largest |cos - cos64| over all pairs of rows. For the other libraries,
  the float32 inner products are normalised in float64, which is the best they can achieve.
* Error of ``gram``: the largest |G - G64| relative to the product of the norms of the two rows.
* Error of an op: the largest |result - float64 result|, relative to the largest magnitude in that
  result, or to the smallest normal float32 if that is larger. The largest error over all tensors
  that the op changes (parameters, memory, total) counts.
* Rows: "zero-mean" is normal; "positive" is uniform in [0, 1); "correlated" is a common normal
  vector plus 0.1 times an independent normal vector per row.

The float64 results are computed by :mod:`fastagg.reference`, on pieces of 2^20 columns.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from benchmarks.machine import describe
from benchmarks.report import markdown
from fastagg import ops
from fastagg.ops import reference

KINDS = ["zero-mean", "positive", "correlated"]
WIDTHS = [10_000, 100_000, 1_000_000, 10_000_000, 100_000_000]
SCALES = ["1e-44", "1e-40", "1e-30", "1e-20", "1e18", "1e30"]  # at d = 1,000,000
COSINE_LIMIT = 1e-8
OP_LIMIT = 2.4e-7  # two units in the last place of a float32 result
LIMITS = {"cosine": COSINE_LIMIT, "gram": COSINE_LIMIT, "abs_max": 0.0}  # others: OP_LIMIT
_TINY = torch.finfo(torch.float32).tiny
ROWS = 8
FEW_ROWS = 3  # from 1e8 columns on: operands and copies then need about 7 GB
_PIECE = 1 << 20


@dataclass(frozen=True)
class Error:
    """One measured error. ``scale``: the factor by which the rows are multiplied."""

    quantity: str
    rows: str
    scale: str
    S: int
    d: int
    by: str
    error: float
    threads: int

    @property
    def limit(self) -> float | None:
        """The largest error that fastagg may have; None if there is no limit."""
        limited = self.by == "fastagg" and float(self.scale) >= _TINY
        return LIMITS.get(self.quantity, OP_LIMIT) if limited else None


def make_rows(kind: str, S: int, d: int, seed: int = 0) -> Tensor:
    """Return rows [S, d] float32 with the distribution `kind`."""
    g = torch.Generator().manual_seed(seed)
    x = torch.empty(S, d)
    if kind == "positive":
        return x.uniform_(generator=g)
    x.normal_(generator=g)
    if kind == "correlated":
        x.mul_(0.1).add_(torch.empty(d).normal_(generator=g))
    elif kind != "zero-mean":
        raise ValueError(f"kind: expected zero-mean, positive or correlated, got {kind!r}")
    return x


def pieces(d: int) -> Iterator[slice]:
    for begin in range(0, d, _PIECE):
        yield slice(begin, min(begin + _PIECE, d))


def cosines(gram: Tensor) -> Tensor:
    """Return the cosines from a Gram matrix, in float64; NaN for rows whose norm is 0 or inf."""
    g = gram.double()
    norms = g.diagonal().sqrt()
    return g / torch.outer(norms, norms)


def exact_gram(x: Tensor) -> Tensor:
    total = torch.zeros(len(x), len(x), dtype=torch.float64)
    for piece in pieces(x.shape[1]):
        total += reference.gram(x[:, piece], dtype=torch.float64)
    return total


def pairwise_cosines(x: Tensor) -> Tensor:
    """Return F.cosine_similarity of every pair of rows."""
    out = torch.eye(len(x))
    for i in range(len(x)):
        for j in range(i):
            out[i, j] = out[j, i] = functional.cosine_similarity(x[i], x[j], dim=0)
    return out


def cosine_errors(kind: str, x: Tensor, scale: str) -> list[Error]:
    """Return the errors of the cosine by fastagg and other libraries, and that of ``gram``."""
    exact = exact_gram(x)
    truth, norms = cosines(exact), exact.diagonal().sqrt()
    ours = ops.gram(x, dtype=torch.float64)
    found = {
        "fastagg": cosines(ours),
        "torch X @ X.T": cosines(torch.mm(x, x.T)),
        "numpy X @ X.T": cosines(_numpy_gram(x)),
        "F.cosine_similarity": pairwise_cosines(x),
    }
    S, d, threads = *x.shape, torch.get_num_threads()
    errors = [
        Error("cosine", kind, scale, S, d, by, worst(cosine, truth), threads)
        for by, cosine in found.items()
    ]
    gram_error = ((ours - exact).abs() / torch.outer(norms, norms)).max().item()
    return [*errors, Error("gram", kind, scale, S, d, "fastagg", gram_error, threads)]


def _numpy_gram(x: Tensor) -> Tensor:
    with np.errstate(all="ignore"):  # overflow at large scales is part of the measurement
        return torch.from_numpy(np.matmul(x.numpy(), x.numpy().T))


def worst(found: Tensor, truth: Tensor) -> float:
    """Return the largest error; infinity if one of the values is NaN."""
    error = (found.double() - truth).abs().max().item()
    return error if error == error else float("inf")


# --- ops ----------------------------------------------------------------------------------------


@dataclass
class State:
    """The tensors that the ops change, for K = S + 1 clients: one client is absent."""

    params: Tensor  # [d]
    memory: Tensor  # [K, d]
    total: Tensor  # [d] float64

    def to_change(self, names: Sequence[str]) -> State:
        """Return this state with the named tensors replaced by copies."""
        copies = {name: getattr(self, name).clone() for name in names}
        return replace(self, **copies)

    def exact(self, piece: slice) -> State:
        """Return some columns in float64, so that the oracle does not round when it stores."""
        return State(*(t[..., piece].double() for t in (self.params, self.memory, self.total)))


def make_state(x: Tensor, scale: float) -> State:
    S, d = x.shape
    memory = make_rows("zero-mean", S + 1, d, seed=1).mul_(scale)
    total = torch.zeros(d, dtype=torch.float64)
    for row in memory:
        total += row
    return State(make_rows("zero-mean", 1, d, seed=2)[0].mul_(scale), memory, total)


OpCall = Callable[..., object]


def op_calls(S: int) -> dict[str, tuple[OpCall, tuple[str, ...]]]:
    """Return, by name of the op, (call(implementation, state, rows), names it changes)."""
    clients = torch.arange(1, S + 1)
    weights = torch.linspace(0.1, 1.0, S, dtype=torch.float64)
    ones = torch.ones(S, dtype=torch.float64)

    def memory_total(m: ModuleType, s: State, x: Tensor) -> None:
        out, peaks = torch.empty_like(s.total), torch.empty(S)
        s.total = m.memory_total_(out, peaks, s.total, s.memory, x, clients, ones)

    return {
        "weighted_sum_": (lambda m, s, x: m.weighted_sum_(s.params, x, weights, 0.5), ("params",)),
        "mimic_": (
            lambda m, s, x: m.mimic_(s.params, x, s.memory, clients, 0.7),
            ("params", "memory"),
        ),
        "memory_update_": (
            lambda m, s, x: m.memory_update_(
                s.params, s.total, s.memory, x, clients, ones, 0.7, 1 / S
            ),
            ("params", "memory", "total"),
        ),
        "mimic_mean_": (
            lambda m, s, x: m.mimic_mean_(s.total, s.params, torch.empty(S), x, s.memory, clients),
            ("params", "total"),
        ),
        "memory_total_": (memory_total, ("total",)),
        "add_total_": (lambda m, s, x: m.add_total_(s.params, s.total, 0.7, 1 / S), ("params",)),
    }


def op_errors(kind: str, x: Tensor, scale: str) -> list[Error]:
    """Return the errors of all ops. The float64 results are computed piece by piece."""
    S, d = x.shape
    before = make_state(x, float(scale))
    errors = [
        Error(name, kind, scale, S, d, "fastagg", error, torch.get_num_threads())
        for name, (call, changes) in op_calls(S).items()
        for error in [_op_error(call, changes, before, x)]
    ]
    errors.append(_abs_max_error(kind, x, scale))
    return errors


def _op_error(call: OpCall, changes: tuple[str, ...], before: State, x: Tensor) -> float:
    after = before.to_change(changes)
    call(ops, after, x)
    largest, apart = dict.fromkeys(changes, _TINY), dict.fromkeys(changes, 0.0)
    for piece in pieces(x.shape[1]):
        exact = before.exact(piece)
        call(reference, exact, x[:, piece])
        for field in changes:
            truth, got = getattr(exact, field), getattr(after, field)[..., piece]
            largest[field] = max(largest[field], truth.abs().max().item())
            apart[field] = max(apart[field], (got.double() - truth).abs().max().item())
    return max(apart[field] / largest[field] for field in changes)


def _abs_max_error(kind: str, x: Tensor, scale: str) -> Error:
    exact = torch.stack([row.abs().max() for row in x])
    error = ((ops.abs_max(x) - exact).abs() / exact).max().item()
    S, d = x.shape
    return Error("abs_max", kind, scale, S, d, "fastagg", error, torch.get_num_threads())


# --- the subcommand -------------------------------------------------------------------------------


def measure(widths: list[int], console: Console) -> list[Error]:
    """Measure all errors."""
    errors = []
    for d in widths:
        for kind in KINDS:
            x = make_rows(kind, FEW_ROWS if d >= 100_000_000 else ROWS, d)
            errors += cosine_errors(kind, x, "1") + op_errors(kind, x, "1")
            console.print(f"{kind} rows, d = {d:,}", style="dim")
    d = min(1_000_000, max(widths))
    for scale in SCALES:
        for kind in KINDS:
            x = make_rows(kind, ROWS, d).double().mul_(float(scale)).float()
            errors += cosine_errors(kind, x, scale) + op_errors(kind, x, scale)
        console.print(f"rows times {scale}, d = {d:,}", style="dim")
    return errors


def tables(errors: list[Error]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Return the tables as {title: (headings, lines)}.

    The table of the cosine has a column per library, that of the ops a column per kind of rows.
    """
    ordered = sorted(
        errors, key=lambda e: (["1", *SCALES].index(e.scale), KINDS.index(e.rows), e.d)
    )
    cosine = [e for e in ordered if e.quantity == "cosine"]
    bys = list(dict.fromkeys(e.by for e in cosine))
    by_row: dict[tuple[str, ...], list[Error]] = {}
    for e in cosine:
        by_row.setdefault((e.rows, e.scale, str(e.S), f"{e.d:,}"), []).append(e)
    by_op: dict[tuple[str, ...], list[Error]] = {}
    for e in sorted(ordered, key=lambda e: e.quantity):
        if e.quantity != "cosine":
            by_op.setdefault((e.quantity, e.scale, str(e.S), f"{e.d:,}"), []).append(e)
    return {
        f"Largest error of the cosine (asked: {COSINE_LIMIT:.0e})": (
            ["rows", "scale", "S", "d", *bys, "verdict"],
            [[*key, *map(_figure, found), _verdict(found)] for key, found in by_row.items()],
        ),
        f"Largest relative error of the ops (asked: {OP_LIMIT}, gram as the cosine)": (
            ["op", "scale", "S", "d", *(f"{kind} rows" for kind in KINDS), "verdict"],
            [[*key, *map(_figure, found), _verdict(found)] for key, found in by_op.items()],
        ),
    }


def _verdict(errors: Sequence[Error]) -> str:
    """Return the verdict of a line: only the errors with a limit, those of fastagg, count."""
    limited = [e for e in errors if e.limit is not None]
    if not limited:
        return "stated"
    return "met" if all(e.error <= e.limit for e in limited if e.limit is not None) else "missed"


def _figure(one: Error) -> str:
    return f"{one.error:.1e}" if 0 < one.error < float("inf") else f"{one.error:.0f}"


def write_csv(path: Path, errors: list[Error]) -> None:
    about = describe()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        columns = [*(field.name for field in fields(Error)), *about]
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for error in errors:
            writer.writerow(asdict(error) | {"error": f"{error.error:.3g}"} | about)


def run(namespace: argparse.Namespace, console: Console) -> list[Error]:
    torch.set_num_threads(namespace.threads)
    widths = [1_000, 10_000] if namespace.quick else WIDTHS
    widths = [d for d in widths if d <= namespace.max_d]
    if not widths:
        raise SystemExit(f"--max-d: expected at least {WIDTHS[0]}, got {namespace.max_d}")
    return measure(widths, console)


def show(errors: list[Error], console: Console) -> None:
    for title, (headings, lines) in tables(errors).items():
        table = Table(*headings, title=title, title_justify="left")
        for line in lines:
            table.add_row(*line)
        console.print(table)


def write_markdown(path: Path, errors: list[Error]) -> None:
    about = ", ".join(f"{name} {value}" for name, value in describe().items())
    parts = [f"# Errors against float64\n\n`python -m benchmarks accuracy` on {about}.\n"]
    for title, (headings, lines) in tables(errors).items():
        parts.append(f"## {title}\n\n{markdown(headings, lines)}")
    path.write_text("\n".join(parts), encoding="utf-8")
