# SPDX-License-Identifier: Apache-2.0
"""Write fastagg/making.pyi: the types of fastagg.make, with one overload for each rule.

A rule is one file, so no committed file lists the rules and their options. This script reads both
from the sources. It imports nothing of fastagg, so it needs neither torch nor the extension.
setup.py runs it in every build, and `make build` when a rule has changed.

The options of a rule are those that a type checker accepts in a call of its class: the arguments of
its constructor by name, and the keys of the TypedDict that the constructor unpacks.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
HEAD = '''\
# SPDX-License-Identifier: Apache-2.0
"""Written by write_stub.py: the options and the class of each rule."""

'''


class Option(NamedTuple):
    """An option: its type and its default, as source text. No default: it is required."""

    type: str
    default: str | None


class Module:
    """The source of one module."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.body = ast.parse(source).body
        self.classes = {node.name: node for node in self.body if isinstance(node, ast.ClassDef)}
        self.origins = {here: (name, here) for here in self.classes}
        """Name in this module: a module that defines it, and its name there ("": a module)."""
        for node in self.body:
            nodes = node.body if isinstance(node, ast.If) else [node]  # if TYPE_CHECKING
            for each in nodes:
                self._add(each)

    def _add(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Import):
            self.origins |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                self.origins[alias.asname or alias.name] = (node.module, alias.name)
        elif isinstance(node, ast.Assign):
            names = [ast.unparse(target) for target in node.targets]
            self.origins |= {name: (self.name, name) for name in names}


class Class(NamedTuple):
    """A class, and the module that defines it."""

    node: ast.ClassDef
    module: Module

    def constructor(self) -> ast.arguments | None:
        for node in self.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return node.args
        return None


class Package:
    """The sources of fastagg, and the imports that the types of options need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.imports: dict[str, tuple[str, str]] = {}
        self.module = functools.cache(self._module)

    def _module(self, name: str) -> Module:
        path = self.folder.joinpath(*name.split(".")[1:])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return Module(name, path.read_text(encoding="utf-8"))

    def rules(self) -> dict[str, Class]:
        """Return the rules by name, sorted."""
        found = {}
        for path in self.folder.glob("rules/*.py"):
            module = self.module(f"fastagg.rules.{path.stem}")
            for node in module.classes.values():
                for decorator in node.decorator_list:
                    if (
                        isinstance(decorator, ast.Call)
                        and ast.unparse(decorator.func) == "register"
                    ):
                        found[ast.literal_eval(decorator.args[0])] = Class(node, module)
        return dict(sorted(found.items()))

    def find(self, name: str, module: Module) -> Class | None:
        """Return the class of this name in a module; None: it is not one of fastagg."""
        while name not in module.classes:
            owner, name = module.origins.get(name, ("", name))
            if owner.partition(".")[0] != "fastagg":
                return None
            module = self.module(owner)
        return Class(module.classes[name], module)

    def ancestry(self, cls: Class) -> Iterator[Class]:
        """Yield a class, then its bases."""
        yield cls
        for base in cls.node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            found = self.find(ast.unparse(name), cls.module)
            if found:
                yield from self.ancestry(found)

    def options(self, rule: Class) -> dict[str, Option]:
        """Return the options of a rule by name, those of its base classes first."""
        found: dict[str, Option] = {}
        constructors = [
            (arguments, cls.module)
            for cls in self.ancestry(rule)
            if (arguments := cls.constructor())
        ]
        for arguments, module in reversed(constructors):
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
                assert argument.annotation, f"{module.name}: {argument.arg} has no type"
                type_ = self.type(argument.annotation, module)
                found[argument.arg] = Option(type_, None if default is None else _shown(default))
        accepted = self.accepted(*constructors[0])
        return {name: option for name, option in found.items() if name in accepted}

    def accepted(self, arguments: ast.arguments, module: Module) -> set[str]:
        """Return the names of the options that a constructor accepts."""
        names = {argument.arg for argument in arguments.kwonlyargs}
        if arguments.kwarg:
            rest = arguments.kwarg.annotation
            assert isinstance(rest, ast.Subscript), f"{module.name}: expected Unpack[TypedDict]"
            keys = self.find(ast.unparse(rest.slice), module)
            assert keys, f"{module.name}: {ast.unparse(rest)} is not a class of fastagg"
            for cls in self.ancestry(keys):
                for node in cls.node.body:
                    if isinstance(node, ast.AnnAssign):
                        names.add(ast.unparse(node.target))
        return names

    def type(self, annotation: ast.expr, module: Module) -> str:
        """Return a type as text; note what must be imported for it."""
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
                assert node.id in module.origins, f"{module.name}: where is {node.id} from?"
                self.add_import(node.id, module.origins[node.id])
        return ast.unparse(annotation)

    def add_import(self, name: str, origin: tuple[str, str]) -> None:
        present = self.imports.setdefault(name, origin)
        assert present == origin, f"{name}: {present} and {origin} have the same name"


def _shown(default: ast.expr) -> str:
    """Return a default as text; "..." if it is no plain value, and the stub would need its name."""
    named = any(isinstance(node, ast.Name) for node in ast.walk(default))
    return "..." if named else ast.unparse(default)


def of_any_rule(rules: list[dict[str, Option]]) -> dict[str, Option]:
    """Return the options of all rules together. Where the rules differ in a type, it is Any."""
    merged = {}
    for name in dict.fromkeys(name for options in rules for name in options):
        found = [options[name] for options in rules if name in options]
        types = {option.type for option in found}
        required = len(found) == len(rules) and not any(option.default for option in found)
        merged[name] = Option(
            types.pop() if len(types) == 1 else "Any", None if required else "..."
        )
    return merged


def overload(name: str, options: dict[str, Option], returned: str, text: str) -> str:
    """Return one overload; ``name`` is the type of the first argument."""
    arguments = [
        f"    {option}: {type_}{'' if default is None else f' = {default}'},"
        for option, (type_, default) in options.items()
    ]
    lines = ["@overload", "def make(", f"    name: {name},", "    *,", *arguments]
    return "\n".join([*lines, f") -> {returned}:", f'    """{text}"""', ""])


def stub(folder: Path) -> str:
    """Return the text of making.pyi for the package in a folder."""
    package, overloads, options = Package(folder), [], []
    for name, rule in package.rules().items():
        cls = rule.node.name
        package.add_import(cls, (rule.module.name, cls))
        options.append(package.options(rule))
        summary = (ast.get_docstring(rule.node) or "").partition("\n")[0].rstrip(":")
        overloads.append(overload(f'Literal["{name}"]', options[-1], cls, summary))
    text = "Make a rule whose name is known only at run time."
    overloads.append(overload("RuleName", of_any_rule(options), "Aggregator[Any, Any]", text))
    for module, name in [
        *(("typing", name) for name in ("Any", "Literal", "overload")),
        ("fastagg.aggregator", "Aggregator"),
        ("fastagg.registry", "RuleName"),
    ]:
        package.add_import(name, (module, name))
    imports = [
        (f"from {module} import {there}" if there else f"import {module}")
        + f" as {here}" * (here != (there or module))
        for here, (module, there) in sorted(package.imports.items(), key=lambda entry: entry[1])
    ]
    return "\n".join([HEAD + "\n".join(imports), "", *overloads])


def write(folder: Path) -> None:
    """Write making.pyi for the package beside this script into a folder."""
    (folder / "making.pyi").write_text(stub(ROOT / "fastagg"), encoding="utf-8")


if __name__ == "__main__":
    write(ROOT / "fastagg")
