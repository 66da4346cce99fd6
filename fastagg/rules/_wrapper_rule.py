# SPDX-License-Identifier: Apache-2.0
"""Base of the rules that average rows before another robust rule judges the averages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastagg.options import read_mapping
from fastagg.registry import available, find
from fastagg.rules._gram_rule import GramRule, ReuseOptions
from fastagg.rules.gram_policy import Around, Policy

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OWN = (
    *("num_clients", "num_params", "server_lr", "device", "nonfinite", "max_norm"),
    *("reuse", "client_weights", "memory_dtype", "memory_folder"),
)


class WrapperRule(GramRule):
    """A rule with another robust rule inside.

    Args:
        wrap: the policy inside -> the policy of this rule.
        rule: name of the rule inside: any that works on the Gram matrix, also another wrapper.
        rule_options: its own options, by name.
        reuse, client_weights: see :class:`GramRule`.
        **options: those of :class:`fastagg.aggregator.Aggregator`.
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
        self.rule_options = {k: v for k, v in inside.options().items() if k not in _OWN}


def _rule_inside(name: str, options: Mapping[str, Any]) -> GramRule:
    """The rule ``make(name, **options)``, of which only the policy is used."""
    own = [option for option in options if option in _OWN]
    if own:
        raise ValueError(f"rule_options: {own} belong to the rule around it, not into rule_options")
    rule = find(name, list(options))
    if not issubclass(rule, GramRule):
        fitting = [other for other in available() if issubclass(find(other, []), GramRule)]
        raise ValueError(f"rule: expected one of {fitting}, got {name!r}")
    return rule(num_clients=1, num_params=1, **options)
