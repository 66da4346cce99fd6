# SPDX-License-Identifier: Apache-2.0
"""Base of the rules that average rows and apply another robust rule to the averages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from fastagg.options import read_mapping
from fastagg.registry import available, find
from fastagg.rules._gram_rule import GramRule, ReuseOptions
from fastagg.rules._sketched_gram_rule import SketchedGramRule
from fastagg.rules.gram_policy import Around, Policy

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OWN = (
    *("num_clients", "num_params", "server_lr", "device", "nonfinite", "max_norm"),
    *("server_optimizer", "min_active", "staleness", "max_staleness"),
    *("clip_norm", "noise_multiplier"),
    *("reuse", "client_weights", "memory_dtype", "memory_folder", "max_age"),
)


class WrapperRule(GramRule):
    """A rule that applies another robust rule, the inner rule, to averages of rows.

    Args:
        wrap: maps the policy of the inner rule to the policy of this rule.
        rule: name of the inner rule, a :class:`GramRule`; it may be a wrapper as well.
        rule_options: options of the inner rule, by name, except those in ``_OWN``.
        reuse, client_weights: see :class:`GramRule`.
        **options: the options of every rule; see :class:`fastagg.Aggregator`.
    """

    def __init__(
        self,
        wrap: Callable[[Policy], Around],
        *,
        rule: str = "geometric-median",
        rule_options: Mapping[str, Any] | None = None,
        reuse: bool = False,
        client_weights: Any = None,
        **options: Unpack[ReuseOptions],
    ) -> None:
        inside = _rule_inside(rule, read_mapping("rule_options", rule_options))
        policy = wrap(inside.policy)
        super().__init__(policy, reuse=reuse, client_weights=client_weights, **options)
        self.rule = rule
        self.rule_options = _options_of(inside)
        self.own_defaults = {"rule_options": _options_of(_rule_inside(rule, {}))}


def _sketches_of(rule: type) -> tuple[str, ...]:
    """Return the options of an inner rule that concern sketches."""
    return ("sketch", "seed") if issubclass(rule, SketchedGramRule) else ()


def _options_of(inside: GramRule) -> dict[str, Any]:
    """Return the options of an inner rule that do not belong to the wrapper."""
    without = (*_OWN, *_sketches_of(type(inside)))
    return {name: value for name, value in inside.options().items() if name not in without}


def _fits(rule: type) -> TypeGuard[type[GramRule]]:
    return issubclass(rule, GramRule) and rule.sums_rows


def _rule_inside(name: str, options: Mapping[str, Any]) -> GramRule:
    """Return the inner rule ``name``; only its policy is used.

    Raises:
        ValueError: the rule does not exist or is no Gram rule, or an option belongs to the wrapper.
        TypeError: the rule has no such option.
    """
    own = [option for option in options if option in _OWN]
    if own:
        raise ValueError(f"rule_options: expected no {own}; pass these to the wrapper rule itself")
    rule = find(name, list(options), argument="rule")
    sketches = [option for option in options if option in _sketches_of(rule)]
    if sketches:
        raise ValueError(f"rule_options: expected no {sketches}: {GramRule.refused['sketch']}")
    if not _fits(rule):
        fitting = [other for other in available() if _fits(find(other, []))]
        raise ValueError(
            f"rule: expected one of {fitting}, got {name!r}; averages are never computed as rows, "
            "so the inner rule must be a weighted sum of rows"
        )
    return rule(num_clients=1, num_params=1, **options)
