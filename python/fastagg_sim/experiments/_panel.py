# SPDX-License-Identifier: Apache-2.0
"""The curves of one panel of an FL-FDMS figure, and the claims about them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean

import numpy as np

from fastagg_sim.experiments._base import Claim
from fastagg_sim.experiments._curves import Curves, compare
from fastagg_sim.experiments._published import Published
from fastagg_sim.experiments._statistics import (
    AREA,
    CHANGE,
    END,
    Trace,
    combine,
    contrast,
    of_rounds,
    over_rounds,
)
from fastagg_sim.verdicts import Estimate, Statement

TOLERANCE = 0.04
AROUND = 5
"""Rounds before and after a published value that its claim is about."""
CLOSE = 0.03
NOT_BELOW = 0.01


class Panel(Curves):
    """The curves of one panel, those of one dropout setting."""

    def after(self, method: str, rounds: int) -> float | None:
        """Return the mean accuracy over seeds after `rounds` rounds, None if not evaluated then."""
        values = [curve.after(rounds) for curve in self.curves[method]]
        known = [value for value in values if value is not None]
        return fmean(known) if len(known) == len(values) else None


def above(name: str, panel: Panel, method: str, other: str) -> Claim:
    """Claim: the accuracy of `method` is above that of `other` at the end."""
    return compare(f"{name}: {method} above {other}", panel, method, other, END, low=0)


def faster(name: str, panel: Panel, method: str, other: str) -> Claim:
    """Claim: the area under the curve of `method` is larger than that of `other`."""
    text = f"{name}: {method} converges faster than {other}"
    return compare(text, panel, method, other, AREA, low=0)


def not_below(name: str, panel: Panel, method: str, other: str) -> Claim:
    """Claim: at the end, `method` is not below `other` by `NOT_BELOW` or more."""
    text = f"{name}: {method} not {NOT_BELOW:g} or more below {other}"
    return compare(text, panel, method, other, END, low=-NOT_BELOW)


def close(name: str, panel: Panel, method: str, other: str) -> Claim:
    """Claim: at the end, the accuracies of `method` and `other` differ by less than `CLOSE`."""
    text = f"{name}: {method} within {CLOSE:g} of {other}"
    return compare(text, panel, method, other, END, low=-CLOSE, high=CLOSE)


def calmer(name: str, panel: Panel, method: str, other: str) -> Claim:
    """Claim: the accuracy of `method` fluctuates less than that of `other`."""
    text = f"{name}: {method} fluctuates less than {other}"
    return compare(text, panel, method, other, CHANGE, high=0)


def comparison_claims(name: str, panel: Panel) -> list[Claim]:
    """The claims of section 6.2 of the paper about one panel of the clustered setting."""
    claims = []
    for other in ("Dropout", "Stale"):
        claims += [above(name, panel, "FDMS", other), faster(name, panel, "FDMS", other)]
    return [*claims, close(name, panel, "FDMS", "Full"), calmer(name, panel, "FDMS", "Dropout")]


def gain_larger(
    text: str, names: tuple[str, str], panels: tuple[Panel, Panel], method: str, other: str
) -> Claim:
    """Claim: `method` gains more over `other` in the first panel than in the second (area under
    the curve).

    names: the names of the two panels.
    """
    statement = Statement("difference", _gained(*panels, method, other), low=0)
    gains = _gains(dict(zip(reversed(names), reversed(panels), strict=True)), method, other)
    return Claim.about(f"{text} ({AREA.text})", [statement], gains)


def _gained(high: Panel, low: Panel, method: str, other: str) -> Estimate:
    """Return what `method` gains over `other` in `high` minus what it gains in `low`."""
    return contrast(
        [
            (1, high.curves[method]),
            (-1, high.curves[other]),
            (-1, low.curves[method]),
            (1, low.curves[other]),
        ],
        AREA,
    )


def _gains(panels: Mapping[str, Panel], method: str, other: str) -> dict[str, float]:
    """Return what `method` gains over `other` in each panel, by its name, rounded for tables."""
    return {name: round(p.minus(method, other, AREA).value, 4) for name, p in panels.items()}


def across_alphas(panels: Mapping[float, Panel]) -> list[Claim]:
    """The claims of section 6.2 of the paper that compare dropout ratios."""
    if len(panels) < 2:
        return []
    alphas = sorted(panels)
    low, high = alphas[0], alphas[-1]
    name = f"alpha={high:g}"
    worst = panels[high]
    fall = contrast([(1, panels[high].curves["Stale"]), (-1, panels[low].curves["Stale"])], AREA)
    return [
        Claim.about(
            f"the gain of FDMS over Dropout grows with alpha ({AREA.text})",
            [
                Statement(
                    f"alpha={b:g} - {a:g}", _gained(panels[b], panels[a], "FDMS", "Dropout"), low=0
                )
                for a, b in pairwise(alphas)
            ],
            _gains({f"alpha={a:g}": panels[a] for a in alphas}, "FDMS", "Dropout"),
        ),
        Claim.about(
            f"Stale is worse at {name} than at {low:g} ({AREA.text})",
            [Statement("difference", fall, high=0)],
            {f"alpha={a:g}": round(panels[a].level("Stale", AREA), 4) for a in alphas},
        ),
        Claim.about(
            f"Stale is the worst at {name} ({AREA.text})",
            worst.differences([("Stale", "Dropout"), ("Stale", "FDMS")], AREA, high=0),
            worst.levels(("Stale", "Dropout", "FDMS"), AREA),
        ),
    ]


def published_claims(name: str, panel: Panel, published: Published) -> list[Claim]:
    """Compare the measured curves with the published ones: one claim per method and round.

    A single run fluctuates more than the published means of 10 runs. The claim is therefore about
    the mean difference over the rounds up to `AROUND` before and after, as far as both curves have
    them. Between the known values, the published curve is taken as straight.
    """
    claims = []
    missing: dict[str, list[int]] = {}
    for method, values in published.accuracy.items():
        line = Trace(0, np.array(published.rounds, dtype=float), np.array(values))
        for rounds, truth in zip(published.rounds, values, strict=True):
            measured = panel.after(method, rounds)
            if measured is None:
                missing.setdefault(method, []).append(rounds)
                continue
            ours = [over_rounds(curve) for curve in panel.curves[method]]
            x = ours[0].x[(ours[0].x >= line.x[0]) & (ours[0].x <= line.x[-1])]
            theirs = [Trace(trace.seed, x, line.at(x)) for trace in ours]
            x = x[abs(x - rounds) <= AROUND]
            statistic = of_rounds(x[0], x[-1])
            estimate = combine([(1, ours), (-1, theirs)], statistic)
            text = f"{name}: {method} within {TOLERANCE} of published after {rounds} rounds"
            claims.append(
                Claim.about(
                    f"{text} ({statistic.text})",
                    [Statement("difference", estimate, -TOLERANCE, TOLERANCE)],
                    {"published": truth, f"round {rounds} alone": round(measured, 4)},
                )
            )
    for method, rounds_missing in missing.items():
        text = f"{name}: {method} as published, after other rounds"
        claims.append(Claim.unmeasured(text, {"not evaluated after rounds": rounds_missing}))
    return claims
