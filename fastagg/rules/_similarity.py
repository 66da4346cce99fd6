# SPDX-License-Identifier: Apache-2.0
"""The similarities of a round's rows: exact, or from random projections of the rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastagg import ops
from fastagg.norm_bound import MaxNorm
from fastagg.options import FLOAT32_LIMIT, read_count
from fastagg.updates.any_rows import AnyRows, alike, each_row
from fastagg.updates.cohort import Cohort
from fastagg.updates.columns import Columns
from fastagg.updates.small import clamped_, diagonal, lowest, quotients, root, scale_pairs_

_PRECISIONS = {"cosine": ["highest", "high", "tf32"], "distance": ["highest", "high"]}
_NEAR = 1e-5  # much more than the rounding of squares in float32
_INCREMENT = 0x9E3779B97F4A7C15  # of the state of SplitMix64
_ALL = (1 << 64) - 1
_LEAST, _MOST = 64, 16384  # k of ops.sketch_


@dataclass(frozen=True)
class Similarity:
    """How similar two rows are, and how that is computed.

    Args:
        kind: "cosine", (cos + 1) / 2, or "distance", -|u_i - u_j|.
        precision: of the exact Gram matrix on a GPU, "highest", "high" or "tf32".
        sketch: number k of buckets of the sketches that scores are computed from; None: of the
            rows themselves.
        seed: of the sketches.

    Raises:
        TypeError, ValueError: an option has a wrong type or value, or does not fit another one.
    """

    kind: str
    precision: str
    sketch: int | None
    seed: int

    def __post_init__(self) -> None:
        if self.kind not in _PRECISIONS:
            expected = list(_PRECISIONS)
            raise ValueError(f"similarity: expected one of {expected}, got {self.kind!r}")
        expected = _PRECISIONS[self.kind]
        if self.precision not in expected:
            raise ValueError(
                f"precision: expected one of {expected} with similarity={self.kind!r}, got "
                f"{self.precision!r}"
            )
        if self.sketch is not None and self.precision != "high":
            raise ValueError(
                f"precision: expected 'high' with sketch={self.sketch}, whose products are few; "
                f"got {self.precision!r}"
            )

    def read(
        self,
        columns: Columns,
        out: Tensor,
        rows: AnyRows,
        weights: Tensor,
        t: int,
        wanted: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute scores and squared norms of S rows, and set ``out = weights @ rows``, in place.

        Args:
            columns: apply ops to the rows.
            out: [d] float32; overwritten.
            rows: S rows of d numbers.
            weights: [S] float64.
            t: number of the round, for the seed of its sketches.
            wanted: [S, S] bool, symmetric; only these pairs are needed. None: all.
            scales: [S] float64, by which rows are multiplied; None: ones.

        Returns:
            Scores [S, S] float64, in [0, 1] or at most 0, and the squared norms of the rows, [S]
            float64. If a squared norm is not finite, the scores of its row mean nothing.
        """
        factors = None if scales is None else scales.to(out.device)
        if scales is not None:
            weights = weights * scales
        if self.sketch is not None:
            return self._estimate(columns, out, rows, weights, t, wanted, factors)
        if wanted is None:
            gram = columns.gram_and_sum_(out, rows, weights, precision=self.precision)
        else:
            columns.weighted_sum_(out, rows, weights, beta=0.0)
            gram = columns.gram(rows, pairs=wanted, precision=self.precision)
        if factors is not None:
            scale_pairs_(gram, factors)
        return self._scores(gram), diagonal(gram)

    def _estimate(
        self,
        columns: Columns,
        out: Tensor,
        rows: AnyRows,
        weights: Tensor,
        t: int,
        wanted: Tensor | None,
        factors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        assert self.sketch is not None
        seed = round_seed(self.seed, t)
        sketches, squares = columns.sketch(rows, self.sketch, seed, out, weights)
        # Scaled to length 1, so that the squares of large rows stay in the range of float32.
        norms = root(squares)
        directions = quotients(sketches, torch.where(norms > 0.0, norms, 1.0)[:, None])
        gram = ops.gram(directions, pairs=wanted, dtype=torch.float64)
        if self.kind == "cosine":
            # Exact norms make the estimates of cosines unbiased. They may leave [-1, 1] by noise.
            clamped_(gram, -1.0, 1.0).diagonal().copy_(norms > 0.0)
        else:
            # A distance is that of the two sketches, so the diagonal is theirs, too.
            lengths = norms if factors is None else norms * factors
            scale_pairs_(gram, lengths)
        return self._scores(gram), squares if factors is None else squares * factors.square()

    def _scores(self, gram: Tensor) -> Tensor:
        return ops.cosine_scores(gram) if self.kind == "cosine" else ops.distance_scores(gram)

    def check(self, scores: Tensor) -> None:
        """Check the scores of finite rows.

        Raises:
            ValueError: distances leave the range of float32.
        """
        # Cosine scores are in [0, 1], distances are at most 0.
        if self.kind == "distance" and lowest(scores) < -FLOAT32_LIMIT:
            raise ValueError("updates: distances between clients leave the range of float32")


def read_sketch(value: object) -> int | None:
    """Return the option ``sketch``: None, or a power of two from 64 to 16384."""
    if value is None:
        return None
    buckets = read_count("sketch", value, least=_LEAST, most=_MOST)
    if buckets & (buckets - 1):
        raise ValueError(f"sketch: expected a power of two from {_LEAST} to {_MOST}, got {value}")
    return buckets


def settle_squares(columns: Columns, cohort: Cohort, squares: Tensor, max_norm: MaxNorm) -> Tensor:
    """Return squared norms [S] that are compared with ``max_norm`` as those of other rules are.

    Squared norms from :func:`fastagg.ops.sketch_` and those of :meth:`Columns.square_norms` differ
    in their last bits. Rows whose norm is nearly ``max_norm`` are therefore read again. Norms are
    those of the rows times the ``scales`` of the cohort.
    """
    if not isinstance(max_norm, float):
        return squares
    near = ((root(squares) - max_norm).abs() <= _NEAR * max_norm).nonzero().flatten().tolist()
    if near:
        rows = each_row(cohort.rows)
        some = alike(cohort.rows, [rows[s] for s in near])
        exact = columns.square_norms(some)
        if cohort.scales is not None:
            exact = exact * cohort.scales[near].square()
        squares[near] = exact.to(squares.device)
    return squares


def read_similarity(similarity: str, precision: str, sketch: object, seed: object) -> Similarity:
    """Return the options of a rule as one object."""
    return Similarity(similarity, precision, read_sketch(sketch), read_count("seed", seed, least=0))


def round_seed(seed: int, t: int) -> int:
    """Return the seed of the sketches of round t: an int64 that looks random.

    It is output t of a SplitMix64 that starts from output 0 of one that starts from ``seed``. So it
    depends on the arguments alone. (A digest of hashlib raises ValueError if memory runs out.)
    """
    mixed = _split_mix(_split_mix(seed) + t * _INCREMENT)
    return mixed - (1 << 64) if mixed >> 63 else mixed


def _split_mix(state: int) -> int:
    """Return the first output of SplitMix64 (Steele, Lea and Flood, 2014), an int in [0, 2^64)."""
    z = (state + _INCREMENT) & _ALL
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _ALL
    return z ^ z >> 31
