# SPDX-License-Identifier: Apache-2.0
"""docs/flower.md: what needs no framework runs as printed, the rest is Python and has its names."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fastagg import robust

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "flower.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_the_calls_run_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in BLOCKS if "robust" in block]
    exec(compile(block, "docs/flower.md", "exec"), {})
    first = capsys.readouterr().out.splitlines()[0]
    assert first in block
    np.testing.assert_allclose(np.fromstring(first.strip("[]"), sep=" ")[0], 3.78788764, rtol=1e-8)


def test_every_callable_is_named() -> None:
    assert all(f"`{name}`" in TEXT for name in robust.__all__)


def test_all_blocks_are_python() -> None:
    assert len(BLOCKS) == 5
    for block in BLOCKS:
        ast.parse(block)


@pytest.mark.flower
def test_the_strategies_are_made_as_printed() -> None:
    pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")
    from fastagg.integrations.flower import FastAggLegacyStrategy, FastAggStrategy

    names = {"FastAggLegacyStrategy": FastAggLegacyStrategy, "FastAggStrategy": FastAggStrategy}
    (legacy,) = [block for block in BLOCKS if block.startswith("strategy = FastAggLegacy")]
    exec(compile(legacy, "docs/flower.md", "exec"), names)
    (block,) = [block for block in BLOCKS if "ServerApp" in block]
    (call,) = [
        node
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "FastAggStrategy"
    ]
    used = eval(ast.unparse(call), names)
    assert used.server.num_clients == 20


@pytest.mark.flower
def test_the_app_and_the_metrics_are_made_as_printed() -> None:
    pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")
    from flwr.app import MetricRecord
    from flwr.serverapp import ServerApp

    (block,) = [block for block in BLOCKS if "ServerApp" in block]
    names: dict[str, object] = {}
    exec(compile(block, "docs/flower.md", "exec"), names)
    assert isinstance(names["app"], ServerApp)
    (block,) = [block for block in BLOCKS if "MetricRecord(" in block]
    names = {"MetricRecord": MetricRecord, "n": 64}
    names["context"] = SimpleNamespace(node_config={"partition-id": 3})
    exec(compile(block, "docs/flower.md", "exec"), names)
    assert names["metrics"] == MetricRecord({"num-examples": 64, "partition-id": 3})


@pytest.mark.flower
def test_the_postprocessor_is_made_as_printed() -> None:
    pytest.importorskip("pfl", reason="pfl is not installed (make test-flower installs it)")
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.postprocessor.base import Postprocessor

    (block,) = [block for block in BLOCKS if "FastAggPostprocessor" in block]
    clipping = Postprocessor()
    names = {"SimulatedBackend": SimulatedBackend, "train": None, "val": None, "clipping": clipping}
    exec(compile(block, "docs/flower.md", "exec"), names)
    assert isinstance(names["backend"], SimulatedBackend)


def test_the_options_of_the_commands_exist() -> None:
    script = (ROOT / "examples" / "flower" / "run.py").read_text(encoding="utf-8")
    for command in re.findall(r"^python run\.py (.*)$", TEXT, re.MULTILINE):
        for option in re.findall(r"--[a-z-]+", command):
            assert f'"{option}"' in script
