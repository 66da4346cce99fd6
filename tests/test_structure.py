# SPDX-License-Identifier: Apache-2.0
"""The design, enforced: who may import whom, what a rule may touch, and the house rules for files.

Imports point one way: kernels <- bindings <- ops <- updates <- memory, checkpoint <- aggregator
<- rules <- robust, distributed, planning, integrations, fastagg_sim <- experiments.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE_SUFFIXES = {".py", ".h", ".cpp", ".cuh", ".cu"}
MAX_LINES = 800

# Lowest first. A module's layer is that of the longest prefix of its dotted name found here.
LAYERS = [
    {"fastagg._C"},
    {"fastagg.ops"},
    {"fastagg.options", "fastagg.costs", "fastagg.signals"},
    {"fastagg.updates"},
    {"fastagg.memory", "fastagg.checkpoint"},
    {"fastagg.aggregator"},
    {"fastagg.registry"},
    {"fastagg.rules"},
    {"fastagg.robust", "fastagg.distributed", "fastagg.planning"},
    {"fastagg.integrations", "fastagg_sim"},
    {"fastagg_sim.experiments"},
    # Doors: they open everything below them, and nothing below may use them.
    {"fastagg.__init__", "fastagg.__main__", "fastagg_sim.__main__", "fastagg_sim.cli"},
]
USES_OF_C = {"fastagg.ops._dispatch", "fastagg.__init__"}

# Names that hold d-sized data in a rule, and all that a rule may call on them besides fastagg.ops.
D_SIZED = {"params", "updates", "rows", "memory", "total", "corrections", "velocity"}
HARMLESS = {"size", "numel", "dim", "stride", "is_contiguous", "data_ptr", "zeros_like"}
# of a RowMemory:
HARMLESS |= {
    "of",
    "references_of",
    "new_reference",
    "settle_",
    "exchange",
    "receive",
    "rows",
    "copy_",
}


def tracked_files() -> list[Path]:
    """The files in git or, in a copy without git, all but hidden and generated ones."""
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False
    )
    if listing.returncode == 0 and listing.stdout:
        paths = (ROOT / name for name in listing.stdout.rstrip("\0").split("\0"))
    else:
        skip = re.compile(r"^(\.venv|\.git|build|dist|runs|\..*_cache|\.hypothesis)$|\.egg-info$")
        paths = (
            path
            for path in ROOT.rglob("*")
            if not any(skip.search(part) or part == "__pycache__" for part in path.parts)
        )
    return sorted(path for path in paths if path.is_file() and path.suffix != ".so")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


TRACKED = tracked_files()
SOURCES = [path for path in TRACKED if path.suffix in SOURCE_SUFFIXES]
CPP = [path for path in SOURCES if path.suffix != ".py"]


def module_name(path: Path) -> str:
    """`fastagg/rules/fdms.py` -> `fastagg.rules.fdms`; a package's own name ends in `.__init__`."""
    base = ROOT / "python" if (ROOT / "python") in path.parents else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts)


MODULES = {
    module_name(path): path
    for path in SOURCES
    if path.suffix == ".py" and relative(path).startswith(("fastagg/", "python/fastagg_sim/"))
}


def layer(module: str) -> int:
    """Index into LAYERS by the longest prefix of `module` found there."""
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
        if name in MODULES or name == "fastagg._C":
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


# --- Python: direction of imports -----------------------------------------------------------


def test_there_is_something_to_check() -> None:
    assert {"fastagg.__init__", "fastagg.ops.__init__", "fastagg.aggregator"} <= MODULES.keys()
    assert any(name.startswith("fastagg.rules.") for name in MODULES)
    assert any(name.startswith("fastagg_sim.") for name in MODULES)
    assert CPP


def import_problem(module: str, target: str) -> str | None:
    """Why `module` may not import `target`, or None."""
    if target == "fastagg._C" and module not in USES_OF_C:
        return "only fastagg.ops._dispatch and the package itself load the extension"
    public = "fastagg.__init__"  # the front door for users, so for fastagg_sim and integrations too
    if target == public and layer(module) >= layer("fastagg_sim"):
        return None
    if target != module and layer(target) > layer(module):
        return "a lower layer imports a higher one"
    return None


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    problems = []
    for target, line in first_party_imports(module, parse(MODULES[module])):
        reason = import_problem(module, target)
        if reason:
            problems.append(f"{relative(MODULES[module])}:{line} imports {target}: {reason}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("module", "target", "allowed"),
    [
        ("fastagg.rules.fdms", "fastagg.ops", True),
        ("fastagg.rules.fdms", "fastagg.aggregator", True),
        ("fastagg.rules.fdms", "fastagg.__init__", False),
        ("fastagg.rules.fdms", "fastagg._C", False),
        ("fastagg.rules.fdms", "fastagg_sim.models", False),
        ("fastagg.ops._dispatch", "fastagg._C", True),
        ("fastagg.ops", "fastagg.rules.fdms", False),
        ("fastagg_sim.runner", "fastagg.__init__", True),
        ("fastagg_sim.runner", "fastagg_sim.experiments.fdms_fig1", False),
        ("fastagg_sim.runner", "fastagg_sim.cli", False),
        ("fastagg_sim.experiments.fdms_fig1", "fastagg_sim.runner", True),
        ("fastagg_sim.cli", "fastagg_sim.experiments.fdms_fig1", True),
    ],
)
def test_the_direction_check_itself(module: str, target: str, allowed: bool) -> None:
    assert (import_problem(module, target) is None) == allowed


def test_only_ops_uses_the_registered_operators() -> None:
    users = [
        relative(path)
        for path in SOURCES
        if path.suffix == ".py"
        and not relative(path).startswith("tests/")
        and any(dotted(node).startswith("torch.ops.fastagg") for node in ast.walk(parse(path)))
    ]
    assert users == ["fastagg/ops/_dispatch.py"]


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
    """The package in which private names of `module` may be used."""
    return module.rpartition(".")[0]


def test_private_modules_are_imported_within_their_package_only() -> None:
    problems = []
    for module, path in MODULES.items():
        for target, line in first_party_imports(module, parse(path)):
            private = re.search(r"\._(?!_)\w+$", target) and target != "fastagg._C"
            if private and owner(target) != owner(module):
                problems.append(f"{relative(path)}:{line} imports {target}")
    assert not problems, "\n".join(problems)


# --- Python: rules are policy ---------------------------------------------------------------


def mentions_d_sized(node: ast.AST) -> bool:
    """Whether the value is a d-sized tensor by name: `params`, `self._memory`, `updates[i]`."""
    if isinstance(node, ast.Subscript | ast.Starred):
        return mentions_d_sized(node.value)
    if isinstance(node, ast.Name):
        return node.id.lstrip("_") in D_SIZED
    return isinstance(node, ast.Attribute) and node.attr.lstrip("_") in D_SIZED


def d_sized_arithmetic(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(what, line) for each arithmetic on d-sized data that bypasses fastagg.ops."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            values = [node.func.value]
            if dotted(node.func.value).split(".")[0] == "torch":
                values += [*node.args, *(keyword.value for keyword in node.keywords)]
            bypasses = node.func.attr not in HARMLESS and any(map(mentions_d_sized, values))
        elif isinstance(node, ast.BinOp):
            bypasses = mentions_d_sized(node.left) or mentions_d_sized(node.right)
        else:
            bypasses = isinstance(node, ast.AugAssign) and mentions_d_sized(node.target)
        if bypasses:
            yield ast.unparse(node), node.lineno


@pytest.mark.parametrize(
    "module", sorted(name for name in MODULES if name.startswith("fastagg.rules."))
)
def test_rules_touch_d_sized_tensors_only_through_ops(module: str) -> None:
    path = MODULES[module]
    found = [f"{relative(path)}:{line}: {what}" for what, line in d_sized_arithmetic(parse(path))]
    assert not found, "use fastagg.ops instead of\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("code", "clean"),
    [
        ("ops.weighted_sum_(params, updates, weights)", True),
        ("n = len(updates); d = params.shape[0]", True),
        ("scores.mean()", True),
        ("params += 1", False),
        ("params.add_(x)", False),
        ("torch.stack(updates)", False),
        ("torch.mean(self._memory, 0)", False),
        ("y = updates[0] - params", False),
    ],
)
def test_the_rule_check_itself(code: str, clean: bool) -> None:
    assert (not list(d_sized_arithmetic(ast.parse(code)))) == clean


# --- C++ ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [p for p in CPP if relative(p).startswith("csrc/kernels/")], ids=relative
)
def test_kernels_know_nothing_of_torch(path: Path) -> None:
    includes = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text("utf-8"), re.MULTILINE)
    foreign = re.compile(
        r"^(torch|ATen|at|c10|caffe2|pybind11|bindings)/|^Python\.h|^\.\./bindings"
    )
    assert not [name for name in includes if foreign.search(name)]


def test_one_registration_block() -> None:
    blocks = [
        relative(path)
        for path in CPP
        for _ in re.findall(r"^\s*TORCH_LIBRARY(?:_FRAGMENT)?\(", path.read_text("utf-8"), re.M)
    ]
    assert blocks == ["csrc/bindings/library.cpp"]


# --- every file -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_source_files_are_short_and_licensed(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES, f"{relative(path)} has {len(lines)} lines: split it"
    assert any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:2])


# Written in pieces, so that this file does not find itself.
_MACHINE_PATHS = r"(?<![\w.$}/-])/(?:work|root|home/\w+|Users/\w+|tmp/\w+|workspace|mnt/\w+)/"
_HOSTS = "|".join(
    rf"{name}\.{ending}"
    for name, ending in [
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npm" + "js", "(?:org|com)"),
        ("download.py" + "torch", "org"),
        ("deb.de" + "bian", "org"),
        ("conda.ana" + "conda", "org"),
    ]
)
_FORBIDDEN = re.compile(f"{_MACHINE_PATHS}|{_HOSTS}")


def test_no_machine_paths_and_no_registry_hosts() -> None:
    found = []
    for path in TRACKED:
        content = path.read_bytes()
        if b"\0" in content[:8192]:  # binary: figures
            continue
        for number, line in enumerate(content.decode("utf-8").splitlines(), 1):
            match = _FORBIDDEN.search(line)
            if match:
                found.append(f"{relative(path)}:{number}: {match.group()}")
    assert not found, "\n".join(found)


# --- documents ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"])
def test_the_documents_exist(name: str) -> None:
    assert (ROOT / name).is_file()


@pytest.mark.parametrize("path", [p for p in TRACKED if p.suffix == ".md"], ids=relative)
def test_relative_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", text)
    local = [t.split("#")[0] for t in targets if not re.match(r"[a-z]+:", t) and t[0] != "#"]
    missing = [target for target in local if not (path.parent / target).exists()]
    assert not missing, f"{relative(path)} links to {missing}"


def test_readme_names_every_rule() -> None:
    import fastagg

    table_rows = [
        line
        for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    missing = [
        name for name in fastagg.available() if not any(f"`{name}`" in row for row in table_rows)
    ]
    assert not missing, f"the README's table of rules lacks {missing}"


def test_every_rule_has_a_test_file_of_its_own() -> None:
    tests = {path.name for path in TRACKED if relative(path).startswith("tests/")}
    rules = [
        name.rpartition(".")[2]
        for name, path in MODULES.items()
        if name.startswith("fastagg.rules.") and "@register(" in path.read_text("utf-8")
    ]
    missing = [rule for rule in rules if f"test_{rule}.py" not in tests]
    assert not missing, f"no tests/**/test_<rule>.py for {missing}"
