# SPDX-License-Identifier: Apache-2.0
"""The curves of one panel of an FL-FDMS figure, and the claims about them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, pstdev, stdev

from fastagg_sim.config import NO_DROPOUT
from fastagg_sim.experiments._base import Claim
from fastagg_sim.experiments._published import Published
from fastagg_sim.records import Curve

TOLERANCE = 0.04
AROUND = 5


class Panel:
    """The curves of one dropout setting: for each method, one curve per seed."""

    def __init__(self, curves: Sequence[Curve], dropout: str) -> None:
        self.curves: dict[str, list[Curve]] = {}
        for curve in curves:
            if curve.dropout in (dropout, NO_DROPOUT):
                self.curves.setdefault(curve.method, []).append(curve)

    def last(self, method: str, count: int = 10) -> float:
        """Return the mean accuracy over seeds and the last `count` evaluations."""
        return fmean(curve.last(count) for curve in self.curves[method])

    def overall(self, method: str) -> float:
        """Return the mean accuracy over seeds and all evaluations; a higher value means faster
        convergence."""
        return fmean(fmean(curve.accuracy) for curve in self.curves[method])

    def after(self, method: str, rounds: int) -> float | None:
        """Return the mean accuracy over seeds after `rounds` rounds, None if not evaluated then."""
        values = [curve.after(rounds) for curve in self.curves[method]]
        known = [value for value in values if value is not None]
        return fmean(known) if len(known) == len(values) else None

    def around(self, method: str, rounds: int, radius: int) -> float | None:
        """Return the mean accuracy over seeds and the evaluations after `rounds` ± `radius`
        rounds."""
        near = range(rounds - radius, rounds + radius + 1)
        values = [curve.after(r) for curve in self.curves[method] for r in near]
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    def fluctuation(self, method: str) -> float:
        """Return the `fluctuation` of the accuracy, averaged over seeds."""
        return fmean(fluctuation(curve.accuracy) for curve in self.curves[method])

    def difference(self, method: str, other: str, count: int = 10) -> tuple[float, float]:
        """Return the accuracy of `method` minus that of `other`, and its standard error.

        The difference is the mean over the last `count` evaluations. The standard error is over
        seeds, which are paired; with a single seed it is over these evaluations.
        """
        pairs = list(zip(self.curves[method], self.curves[other], strict=True))
        if len(pairs) > 1:
            return mean_and_error([a.last(count) - b.last(count) for a, b in pairs])
        (one, two) = pairs[0]
        recent = zip(one.accuracy[-count:], two.accuracy[-count:], strict=True)
        return mean_and_error([a - b for a, b in recent])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of `values` and its standard error, which is 0 for a single value."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return fmean(values), error


def fluctuation(values: Sequence[float]) -> float:
    """Return the standard deviation of the changes between consecutive values, in the second half
    of a run."""
    half = values[len(values) // 2 :]
    steps = [after - before for before, after in pairwise(half)]
    return pstdev(steps) if steps else 0.0


def above(name: str, panel: Panel, method: str, other: str) -> Claim:
    """Claim: the accuracy of `method` is above that of `other` at the end."""
    numbers = {key: round(panel.last(key), 4) for key in (method, other)}
    text = f"{name}: {method} above {other} in the last 10 evaluations"
    return Claim(text, numbers[method] > numbers[other], numbers)


def faster(name: str, panel: Panel, method: str, other: str) -> Claim:
    """Claim: the accuracy of `method` is above that of `other` on average over the run."""
    numbers = {key: round(panel.overall(key), 4) for key in (method, other)}
    text = f"{name}: {method} converges faster than {other} (mean over the run)"
    return Claim(text, numbers[method] > numbers[other], numbers)


def not_below(name: str, panel: Panel, method: str, other: str) -> Claim:
    """Claim: at the end, `method` is not below `other` by more than one standard error."""
    mean, error = panel.difference(method, other)
    numbers = {"difference": round(mean, 4), "standard error": round(error, 4)}
    text = f"{name}: {method} not below {other}, up to one standard error (last 10 evaluations)"
    return Claim(text, mean >= -error, numbers)


def close(name: str, panel: Panel, method: str, other: str, tolerance: float = 0.03) -> Claim:
    """Claim: at the end, the accuracies of `method` and `other` differ by at most `tolerance`."""
    numbers = {key: round(panel.last(key), 4) for key in (other, method)}
    text = f"{name}: {method} within {tolerance:g} of {other} in the last 10 evaluations"
    return Claim(text, abs(numbers[method] - numbers[other]) <= tolerance, numbers)


def calmer(name: str, panel: Panel, method: str, other: str) -> Claim:
    """Claim: the accuracy of `method` fluctuates less than that of `other`."""
    noise = {key: round(panel.fluctuation(key), 4) for key in (method, other)}
    text = f"{name}: {method} fluctuates less from round to round than {other}"
    return Claim(text, noise[method] < noise[other], noise)


def comparison_claims(name: str, panel: Panel) -> list[Claim]:
    """The claims of section 6.2 of the paper about one panel of the clustered setting."""
    claims = []
    for other in ("Dropout", "Stale"):
        claims += [above(name, panel, "FDMS", other), faster(name, panel, "FDMS", other)]
    return [*claims, close(name, panel, "FDMS", "Full"), calmer(name, panel, "FDMS", "Dropout")]


def across_alphas(panels: Mapping[float, Panel]) -> list[Claim]:
    """The claims of section 6.2 of the paper that compare dropout ratios."""
    if len(panels) < 2:
        return []
    alphas = sorted(panels)
    low, high = alphas[0], alphas[-1]
    gaps = {a: panels[a].overall("FDMS") - panels[a].overall("Dropout") for a in alphas}
    stale = {a: panels[a].overall("Stale") for a in alphas}
    worst = {name: panels[high].overall(name) for name in ("Dropout", "Stale", "FDMS")}
    return [
        Claim(
            f"the gain of FDMS over Dropout is larger at alpha={high:g} than at {low:g} "
            "(mean over the run)",
            gaps[high] > gaps[low],
            {f"alpha={a:g}": round(gap, 4) for a, gap in gaps.items()},
        ),
        Claim(
            f"Stale is worse at alpha={high:g} than at {low:g} (mean over the run)",
            stale[high] < stale[low],
            {f"alpha={a:g}": round(value, 4) for a, value in stale.items()},
        ),
        Claim(
            f"Stale is the worst at alpha={high:g} (mean over the run)",
            min(worst, key=lambda name: worst[name]) == "Stale",
            {name: round(value, 4) for name, value in worst.items()},
        ),
    ]


def published_claims(name: str, panel: Panel, published: Published) -> list[Claim]:
    """Compare the measured curves with the published ones: one claim per method and round.

    The numbers also include the mean over the neighbouring rounds, because a single run fluctuates
    more than the published means of 10 runs.
    """
    claims = []
    missing: dict[str, list[int]] = {}
    for method, values in published.accuracy.items():
        for rounds, truth in zip(published.rounds, values, strict=True):
            measured = panel.after(method, rounds)
            if measured is None:
                missing.setdefault(method, []).append(rounds)
                continue
            numbers = {"measured": round(measured, 4), "published": truth}
            around = panel.around(method, rounds, AROUND)
            if around is not None:
                numbers[f"rounds {rounds - AROUND}-{rounds + AROUND}"] = round(around, 4)
            text = f"{name}: {method} after {rounds} rounds within {TOLERANCE} of published"
            claims.append(Claim(text, abs(measured - truth) <= TOLERANCE, numbers))
    for method, rounds_missing in missing.items():
        text = f"{name}: {method} as published, after other rounds"
        claims.append(Claim(text, None, {"not evaluated after rounds": rounds_missing}))
    return claims
