# SPDX-License-Identifier: Apache-2.0
"""The layers of the project: which module may import which.

Imports point one way: kernels <- bindings <- ops <- updates <- memory, checkpoint <- aggregator
<- rules <- robust, distributed, planning, integrations, fastagg_sim <- experiments.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[1]
KERNELS = sorted(path for path in (ROOT / "csrc/kernels").rglob("*.*") if path.suffix != ".md")

# Lowest first. A module's layer is that of the longest prefix of its dotted name found here.
LAYERS = [
    {"fastagg._C", "fastagg._built_for"},
    {"fastagg.ops", "fastagg._extension"},
    {
        *("fastagg.options", "fastagg.costs", "fastagg.signals", "fastagg.calls", "fastagg.modes"),
        *("fastagg.report", "fastagg.durable", "fastagg.noise"),
        "fastagg.tensor_file",
    },
    {"fastagg.updates"},
    {
        *("fastagg.memory", "fastagg.checkpoint", "fastagg.norm_bound", "fastagg.row_checks"),
        *("fastagg.server_optimizer", "fastagg.clipping", "fastagg.clipped_steps"),
        *("fastagg.staleness", "fastagg.description", "fastagg.churn"),
        "fastagg.saved_state",
    },
    {"fastagg.aggregator"},
    {"fastagg.registry"},
    {"fastagg.making", "fastagg.loading"},
    {"fastagg.rules"},
    {
        *("fastagg.robust", "fastagg.distributed", "fastagg.planning"),
        *("fastagg.inbox", "fastagg.answer_files", "fastagg.privacy"),
    },
    {"fastagg.integrations", "fastagg_sim"},
    {"fastagg_sim.experiments"},
    # Entry points: they import everything below them, and nothing below may import them.
    {"fastagg.__init__", "fastagg.__main__", "fastagg_sim.__main__", "fastagg_sim.cli"},
]
BUILT = {"fastagg._C", "fastagg._built_for"}  # setup.py makes them
# Functions that make a tensor on the default device, if they are not told another one.
FACTORIES = {f"torch.{function.__name__}" for function in _device_constructors()}
USES_OF_C = {"fastagg._extension", "fastagg.ops._dispatch", "fastagg.ops.memory"}


def module_name(path: Path) -> str:
    """`fastagg/rules/fdms.py` -> `fastagg.rules.fdms`; a package's own name ends in `.__init__`."""
    base = ROOT / "python" if (ROOT / "python") in path.parents else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts)


MODULES = {
    module_name(path): path
    for folder in ("fastagg", "python/fastagg_sim")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if module_name(path) not in BUILT
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def layer(module: str) -> int:
    """Return the index into LAYERS by the longest prefix of `module` found there."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for index, names in enumerate(LAYERS):
            if prefix in names:
                return index
    raise AssertionError(f"{module} belongs to no layer")


def resolve(name: str) -> str:
    """The module behind an imported dotted name: a module, a package's `__init__`, or its owner."""
    while name:
        if name in MODULES or name in BUILT:
            return name
        if f"{name}.__init__" in MODULES:
            return f"{name}.__init__"
        name = name.rpartition(".")[0]
    raise LookupError(name)


def first_party_imports(module: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(module, line) for every import of fastagg and fastagg_sim, also inside functions."""
    package = module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            head = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*head, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] in ("fastagg", "fastagg_sim"):
                yield resolve(name), node.lineno


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=relative(path))


def dotted(node: ast.AST) -> str:
    """`torch.ops.fastagg` for that attribute chain, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def test_there_is_something_to_check() -> None:
    assert {"fastagg.__init__", "fastagg.ops.__init__", "fastagg.aggregator"} <= MODULES.keys()
    assert any(name.startswith("fastagg.rules.") for name in MODULES)
    assert any(name.startswith("fastagg_sim.") for name in MODULES)
    assert KERNELS


def import_problem(module: str, target: str) -> str | None:
    """Return why `module` may not import `target`, or None."""
    if target in BUILT and module not in USES_OF_C:
        return "only fastagg.ops._dispatch and the package itself load the extension"
    public = (
        "fastagg.__init__"  # the entry point for users, and so for fastagg_sim and integrations
    )
    if target == public and layer(module) >= layer("fastagg_sim"):
        return None
    if target != module and layer(target) > layer(module):
        return "a lower layer imports a higher one"
    return None


def test_imports_point_down() -> None:
    problems = []
    for module, path in MODULES.items():
        for target, line in first_party_imports(module, parse(path)):
            reason = import_problem(module, target)
            if reason:
                problems.append(f"{relative(path)}:{line} imports {target}: {reason}")
    assert not problems, "\n".join(problems)


def test_only_ops_uses_the_registered_operators() -> None:
    users = [
        relative(path)
        for path in [*MODULES.values(), *sorted((ROOT / "benchmarks").glob("*.py"))]
        if any(dotted(node).startswith("torch.ops.fastagg") for node in ast.walk(parse(path)))
    ]
    assert users == ["fastagg/ops/_dispatch.py"]


def test_the_library_names_the_device_of_each_tensor_that_it_makes() -> None:
    assert {"torch.tensor", "torch.zeros", "torch.as_tensor", "torch.arange"} <= FACTORIES
    problems = [
        f"{relative(path)}:{node.lineno}: {dotted(node.func)} without device="
        for module, path in MODULES.items()
        if module.startswith("fastagg.")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and dotted(node.func) in FACTORIES
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]
    assert not problems, "a default device of the caller would decide:\n" + "\n".join(problems)


def test_no_circle_of_imports() -> None:
    graph = {
        module: {target for target, _ in first_party_imports(module, parse(path))} - {module}
        for module, path in MODULES.items()
    }
    while leaves := [module for module, targets in graph.items() if not targets & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert not graph, f"these import each other, directly or through others: {sorted(graph)}"


def owner(module: str) -> str:
    """Return the package in which private names of `module` may be used."""
    return module.rpartition(".")[0]


def test_private_modules_are_imported_within_their_package_only() -> None:
    problems = []
    for module, path in MODULES.items():
        for target, line in first_party_imports(module, parse(path)):
            private = re.search(r"\._(?!_)\w+$", target) and target not in BUILT
            if private and owner(target) != owner(module):
                problems.append(f"{relative(path)}:{line} imports {target}")
    assert not problems, "\n".join(problems)


def test_kernels_include_nothing_of_torch_or_the_bindings() -> None:
    foreign = re.compile(
        r"^(torch|ATen|at|c10|caffe2|pybind11|bindings)/|^Python\.h|^(\.\./)+bindings"
    )
    problems = [
        f"{relative(path)} includes {name}"
        for path in KERNELS
        for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text("utf-8"), re.M)
        if foreign.search(name)
    ]
    assert not problems, "\n".join(problems)


def test_operators_are_declared_in_one_place() -> None:
    sources = sorted((ROOT / "csrc").rglob("*.cpp"))
    blocks = [
        relative(path)
        for path in sources
        for _ in re.findall(r"^\s*TORCH_LIBRARY(?:_FRAGMENT)?\(", path.read_text("utf-8"), re.M)
    ]
    assert blocks == ["csrc/bindings/library.cpp"]
