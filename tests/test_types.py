# SPDX-License-Identifier: Apache-2.0
"""What type checkers know: the options and classes of rules, and the package's attributes."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
import sys
from pathlib import Path

import pytest

import fastagg
from fastagg.options import option_defaults
from fastagg.registry import find

write_stub = pytest.importorskip("write_stub", reason="there is no write_stub.py beside the tests")
ROOT = Path(__file__).resolve().parents[1]
REQUIRED = object()


def overloads(stub: str) -> dict[str, tuple[str, dict[str, object]]]:
    """Return the class and the options with their defaults, by the type of the name."""
    found = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.FunctionDef):
            name = node.args.args[0].annotation
            defaults = [
                REQUIRED if default is None else ast.literal_eval(default)
                for default in node.args.kw_defaults
            ]
            options = dict(zip([a.arg for a in node.args.kwonlyargs], defaults, strict=True))
            assert name and node.returns
            found[ast.unparse(name)] = (ast.unparse(node.returns), options)
    return found


def test_the_stub_has_every_rule_with_its_options_and_class() -> None:
    found = overloads(write_stub.stub(ROOT / "fastagg"))
    everything: set[str] = set()
    for name in fastagg.available():
        rule = find(name, [])
        returned, options = found.pop(f"Literal['{name}']")
        assert returned == rule.__name__
        expected = dict(option_defaults(rule))
        for option in expected.keys() - options.keys():  # that of a base class
            with pytest.raises(TypeError, match=f"{option}: not an option of {name}"):
                rule(num_clients=2, num_params=1, **{option: None})
            del expected[option]
        required = [o for o, default in expected.items() if default is inspect.Parameter.empty]
        expected |= dict.fromkeys(required, REQUIRED)
        assert options == expected
        everything |= options.keys()
    returned, options = found.pop("RuleName")
    assert options.keys() == everything and not found
    assert [o for o, d in options.items() if d is REQUIRED] == ["num_clients", "num_params"]


RULE = """
import fractions as f
from typing import TYPE_CHECKING

from fastagg.aggregator import CommonOptions
from fastagg.registry import register
from fastagg.rules.fedavg import FedAvg

if TYPE_CHECKING:
    from typing_extensions import Unpack

Level = int | f.Fraction
LOWEST = 1


@register("levelled")
class Levelled(FedAvg):
    def __init__(
        self, *, level: Level = LOWEST, base: f.Fraction, **options: Unpack[CommonOptions]
    ) -> None:
        super().__init__(**options)
        self.base = base
"""

# A comment names the kind of the first message about its line, and a part of its text.
USER = """
from fractions import Fraction
from typing import Any, Literal

import fastagg
import fastagg.bits
from fastagg import RuleName, make
from fastagg.bits import pack
from fastagg.client_files import ClientFiles
from fastagg.columns import Columns, ColumnSource  # error: has no attribute "ColumnSource"
from fastagg.reference import gram
from fastagg.robust_ops import weighted_sum_
from fastagg.streaming import ColumnSource, TensorRows

def other_paths(source: ColumnSource) -> None:
    reveal_type(pack)  # note: "def (flags:
    reveal_type(ClientFiles)  # note: -> fastagg.updates.files.ClientFiles
    reveal_type(Columns)  # note: -> fastagg.updates.columns.Columns
    reveal_type(gram)  # note: "def (
    reveal_type(weighted_sum_)  # note: "def (
    reveal_type(TensorRows)  # note: -> fastagg.updates.streams.TensorRows

fdms = make("fdms", num_clients=4, num_params=3, similarity="distance", server_lr=1)
reveal_type(fdms)  # note: "fastagg.rules.fdms.FDMS"
fdms.scores.sum()
fdms.scroes  # error: "FDMS" has no attribute "scroes"
make("mifa", num_clients=4, num_params=3).scores  # error: "MIFA" has no attribute "scores"

def wrong_options() -> None:
    make("fdms", num_clients=4, num_params=3, simlarity="cosine")  # error: mean "similarity"?
    make("fdms", num_clients=4, num_params=3, tau=1.0)  # error: "str", "int", "int", "float"
    make("fdms", num_clients=4, num_params=3, similarity=1)  # error: "str", "int", "int", "int"
    make("fdms", num_clients="4", num_params=3)  # error: "str", "str", "int"
    make("fdms", num_clients=4)  # error: "str", "int"
    make("fdms", 4, 3)  # error: "str", "int", "int"
    make("fdms-soft", num_clients=4, num_params=3, elimination=None)  # error: No overload

def wrong_names() -> None:
    make("fdsm", num_clients=4, num_params=3)  # error: No overload variant of "make"
    fastagg.mak("fdms", num_clients=4, num_params=3)  # error: maybe "make"?

def names_at_run_time(
    name: str, given: Any, one: Literal["mifa", "fdms"], **options: Any
) -> None:
    make(name, num_clients=4, num_params=3)  # error: No overload variant of "make"
    agg = make(RuleName(name), num_clients=4, num_params=3, tau=1.0, **options)
    reveal_type(agg)  # note: "fastagg.aggregator.Aggregator[Any, Any]"
    make(RuleName(name), num_clients=4, num_params=3, tua=1.0)  # error: Unexpected
    make(RuleName(name), num_clients=4, num_params=3, tau=[])  # error: No overload
    for each in fastagg.available():
        make(each, num_clients=4, num_params=3)
    make(given, num_clients=4, num_params=3)
    reveal_type(make(one, **options))  # note: "fastagg.rules.mifa.MIFA | fastagg.rules.fdms.FDMS"

def any_rule(agg: fastagg.Aggregator, rule: type[fastagg.Aggregator]) -> str:
    return agg.name + rule.name

def submodules() -> None:
    fastagg.robust.Krum(f=1)
    fastagg.robust.Krumm(f=1)  # error: Module has no attribute "Krumm"
    fastagg.distributed.shard_bounds
    fastagg.integrations
    fastagg.bits.pack, fastagg.reference.gram

def new_rule(half: Fraction) -> None:
    agg = make("levelled", num_clients=4, num_params=3, base=half, level=half)
    reveal_type(agg.base)  # note: "fractions.Fraction"
    make("levelled", num_clients=4, num_params=3, base=half, level="x")  # error: No overload
    make("levelled", num_clients=4, num_params=3)  # error: No overload
"""

SETTINGS = """
[mypy]
strict = true
[mypy-fastagg.*]
follow_imports = silent
[mypy-torch.*,mypy-numpy.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_mypy_knows_the_options_and_attributes_of_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a new rule, in a package to which one file was added, and then the stub written."""
    api = pytest.importorskip("mypy.api")
    built = shutil.ignore_patterns("*.so", "making.pyi", "__pycache__")
    package = Path(shutil.copytree(ROOT / "fastagg", tmp_path / "fastagg", ignore=built))
    package.joinpath("rules", "levelled.py").write_text(RULE, encoding="utf-8")
    stub = write_stub.stub(package)
    package.joinpath("making.pyi").write_text(stub, encoding="utf-8")
    tmp_path.joinpath("user.py").write_text(USER, encoding="utf-8")
    tmp_path.joinpath("mypy.ini").write_text(SETTINGS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MYPYPATH", raising=False)
    shown, problems, _ = api.run(["user.py", "--no-pretty", "--cache-dir", "cache"])
    assert not problems
    found: dict[int, tuple[str, str]] = {}
    for line, kind, text in re.findall(r"^user\.py:(\d+): (\w+): (.*)$", shown, re.MULTILINE):
        found.setdefault(int(line), (kind, text))
    comments = re.compile(r"  # (\w+): (.*)$")
    expected = {
        number: comment.groups()
        for number, line in enumerate(USER.splitlines(), start=1)
        if (comment := comments.search(line))
    }
    assert found.keys() == expected.keys(), shown
    for number, (kind, text) in expected.items():
        assert found[number][0] == kind and text in found[number][1], found[number]


def test_the_stub_of_a_second_name_has_what_the_module_has() -> None:
    """``__all__`` of a package is the sum of those of its modules, which mypy does not follow."""
    second = {
        name: module
        for name, module in sys.modules.items()
        if name.startswith("fastagg.") and module.__name__ != name
    }
    assert {"fastagg.streaming", "fastagg.client_files"} <= second.keys()
    for name, module in second.items():
        path = ROOT / f"{name.replace('.', '/')}.pyi"
        names: set[str] = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                source = importlib.import_module(str(node.module))
                everything = getattr(source, "__all__", vars(source))
                names.update(*(everything if a.name == "*" else [a.name] for a in node.names))
        assert names >= set(getattr(module, "__all__", ())), path.name
