# SPDX-License-Identifier: Apache-2.0
"""The strategies take the arguments of Flower's own, with the same names and defaults."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from flwr.server import strategy as legacy
from flwr.serverapp import strategy as messages

from fastagg.integrations.flower import FastAggLegacyStrategy, FastAggStrategy

pytestmark = pytest.mark.flower


def test_the_message_api() -> None:
    theirs = dict(inspect.signature(messages.FedAvg).parameters)
    ours = inspect.signature(FastAggStrategy).parameters
    assert len(theirs) >= 10
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
    made = FastAggStrategy("fdms", num_clients=20, fraction_train=0.25, min_train_nodes=3)
    assert (made.fraction_train, made.min_train_nodes) == (0.25, 3)


def test_the_legacy_api() -> None:
    theirs = inspect.signature(legacy.FedAvg).parameters
    assert len(theirs) >= 10
    defaults = {name: p.default for name, p in theirs.items()}
    made = FastAggLegacyStrategy("fdms", num_clients=20, **defaults)
    plain = legacy.FedAvg()
    for name in theirs:
        assert getattr(made, name) == getattr(plain, name), name
    made = FastAggLegacyStrategy("fdms", num_clients=20, fraction_fit=0.25, min_fit_clients=3)
    assert (made.fraction_fit, made.min_fit_clients) == (0.25, 3)
