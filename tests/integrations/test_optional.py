# SPDX-License-Identifier: Apache-2.0
"""Without a framework, fastagg works and the integration names the missing package."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import sys
from importlib.abc import MetaPathFinder

MISSING = ("flwr", "pfl", "nvflare", "flgo")

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in MISSING else real(name)
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.slow
def test_a_missing_framework_is_named() -> None:
    code = (
        BLOCK
        + """
import importlib
for module in ("flower", "pfl", "nvflare", "flgo"):
    try:
        importlib.import_module(f"fastagg.integrations.{module}")
    except ImportError as error:
        print(error)
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    expected = [("flower", "flwr"), ("pfl", "pfl"), ("nvflare", "nvflare"), ("flgo", "flgo")]
    assert len(lines) == len(expected)
    for line, (module, package) in zip(lines, expected, strict=True):
        assert f"fastagg.integrations.{module} needs {package}, which is not installed" in line
        assert "pip install 'fastagg[" in line


@pytest.mark.slow
def test_fastagg_itself_imports_no_framework() -> None:
    code = (
        "import sys, fastagg, fastagg.integrations._server, fastagg.robust\n"
        "assert not {'flwr', 'pfl', 'flgo', 'nvflare', 'byzfl', 'grpc'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
