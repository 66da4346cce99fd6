# SPDX-License-Identifier: Apache-2.0
"""Without a framework: fastagg as a whole works, and its integration says what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flwr", "pfl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("flwr", "pfl") else real(name)
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize(("module", "package"), [("flower", "flwr"), ("pfl", "pfl")])
def test_a_missing_framework_is_named(module: str, package: str) -> None:
    code = BLOCK + f"import fastagg.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"fastagg.integrations.{module} needs {package}, which is not installed" in last
    assert "pip install 'fastagg[" in last


def test_fastagg_itself_imports_no_framework() -> None:
    code = (
        "import sys, fastagg, fastagg.integrations._server, fastagg.robust\n"
        "assert not {'flwr', 'pfl', 'byzfl', 'grpc'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
