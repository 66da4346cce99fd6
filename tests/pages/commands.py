# SPDX-License-Identifier: Apache-2.0
"""Checks of commands for test_code_blocks.py: run a command, or only its cheap first part."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from fastagg_sim import cli, data, devices, report, results
from fastagg_sim.shadow_runs import Shadow
from tests.shadows import any_candidates

ROOT = Path(__file__).resolve().parents[2]


def pages() -> list[Path]:
    """Return all pages of the project, relative to its root, except in hidden folders."""
    skip = re.compile(r"^(\.|build$|dist$|runs$)")
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(path for path in found if not any(skip.search(part) for part in path.parts))


class Wrong(AssertionError):
    """A block or command that would not work; the message gives the reason."""


@dataclass
class Shell:
    """The current folder of commands and the fixtures they need; see :meth:`check`."""

    start: Path
    monkeypatch: pytest.MonkeyPatch
    pytest_parser: Any
    scratch: Path
    here: Path = field(init=False)

    def __post_init__(self) -> None:
        self.here = self.start

    def check(self, text: str) -> int:
        """Check the lines of a block and return the number of commands."""
        count = 0
        for line in text.replace("\\\n", " ").splitlines():
            _, _, comment = line.partition("  #")
            for named in re.findall(r'\bmake [a-z-]+(?: [A-Z]+="[^"]*")?', comment):
                self.command(shlex.split(named))
            words: list[str] = []
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            for word in [*lexer, "&&"]:
                if word == "&&":
                    count += bool(words)
                    if words:
                        self.command(words)
                    words = []
                elif set(word) <= set("();<>|&"):
                    raise Wrong(f"{line!r}: no check for {word!r}")
                else:
                    words.append(word)
        return count

    def command(self, words: Sequence[str]) -> None:
        name, *arguments = words
        name = name.removeprefix(".venv/bin/")
        known: dict[str, Callable[[list[str]], None]] = {
            "cd": self.cd,
            "make": self.make,
            "fastagg-sim": self.fastagg_sim,
            "python": self.python,
            "torchrun": self.torchrun,
            "pip": self.pip,
            "uv": self.uv,
            "pre-commit": self.pre_commit,
            ".ci/run": self.ci,
        }
        if name not in known:
            raise Wrong(f"no check for the command {name!r}")
        try:
            known[name](arguments)
        except SystemExit as error:  # of a parser; 0 is --help
            if error.code not in (0, None):
                raise Wrong(f"{shlex.join(words)}: refused with status {error.code}") from error

    def cd(self, arguments: list[str]) -> None:
        (folder,) = arguments
        self.here = self.here / folder
        if not self.here.is_dir():
            raise Wrong(f"cd: there is no folder {folder}")

    def make(self, arguments: list[str]) -> None:
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        listed = set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE)) | {"distclean"}
        for word in arguments:
            variable = re.match(r"([A-Z_]+)=", word)
            if variable is None and word not in listed:
                raise Wrong(f"make: {word!r} is not a target that `make` lists")
            if variable is not None and f"$({variable[1]})" not in makefile:
                raise Wrong(f"make: the Makefile has no variable {variable[1]}")
        if shutil.which("make") is None:
            pytest.skip("make is not on this machine")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        done = subprocess.run(
            ["make", "-n", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise Wrong(f"make {shlex.join(arguments)}: {done.stderr}")
        missing = re.search(r'\[ -n "" \] \|\| \{ echo "make: ([^"]*)"', done.stdout)
        if missing:  # what the recipe would say first
            raise Wrong(f"make: {missing[1]}")
        if any(word.startswith("ARGS=") for word in arguments):
            (last,) = done.stdout.strip().splitlines()[-1:]
            self.command(shlex.split(last))

    def fastagg_sim(self, arguments: list[str]) -> None:
        def execute(command: Any, console: Any) -> int:
            folders = getattr(command, "folders", ())
            if isinstance(command, cli.PlotCommand | cli.ClaimsCommand):
                folders = (command.folder,)
            elif isinstance(command, cli.DataCommand):
                if command.name not in data.DATASETS:
                    raise Wrong(f"fastagg-sim data: there is no {command.name!r}")
                return 0
            if not folders:
                return whole(command, console)
            for folder in folders:
                if folder.parts[0] not in ("build", "runs") and not any(
                    (ROOT / folder).rglob("metrics.csv")
                ):
                    raise Wrong(f"fastagg-sim: there are no results in {folder}")
            return 0

        def stop(jobs: Sequence[object], **_: object) -> None:
            raise Begun

        def load(name: str, *, seed: int = 0, **options: Any) -> data.Dataset:
            try:
                return real_load(name, root=self.scratch / "no data", seed=seed, **options)
            except data.DataNotFoundError:
                return blank(data.DATASETS[name])

        class Begun(Exception):
            """All checks are passed."""

        whole, real_load = cli._execute, data.load
        with self.monkeypatch.context() as patch:
            patch.chdir(self.scratch)
            patch.setattr(cli, "_execute", execute)
            patch.setattr(report, "run_jobs", stop)
            patch.setattr(data, "load", load)
            patch.setattr(Shadow, "candidates", any_candidates)
            for module in (devices, report):
                patch.setattr(module, "require_device", lambda device: None)
            patch.setattr(results, "versions", lambda device: {})  # has the name of the GPU
            try:
                status = cli.main(arguments)
            except Begun:
                status = 0
        if status:
            raise Wrong(f"fastagg-sim {shlex.join(arguments)}: refused with status {status}")

    def python(self, arguments: list[str]) -> None:
        first, *rest = arguments
        if first != "-m":
            self.script(first, rest)
            return
        module, *rest = rest
        if module == "benchmarks":
            importlib.import_module("benchmarks.__main__").parser().parse_args(rest)
        elif module in ("tests.fuzz.checkpoints", "tests.fuzz.threads", "benchmarks.cuda_profile"):
            importlib.import_module(module).parser().parse_args(rest)
        elif (module, len(rest)) in (("tests.rules.clip_peaks", 0), ("benchmarks.cuda_verdict", 1)):
            importlib.import_module(module)
        elif module == "pytest":
            _, unknown = self.pytest_parser.parse_known_and_unknown_args(rest)
            if unknown:
                raise Wrong(f"pytest: there are no options {unknown}")
        elif module == "fastagg" and not rest:
            with self.monkeypatch.context() as patch:
                patch.setattr(sys, "argv", ["fastagg"])
                runpy.run_module("fastagg", run_name="__main__")
        else:
            raise Wrong(f"no check for python -m {module} {shlex.join(rest)}")

    def torchrun(self, arguments: list[str]) -> None:
        parser = importlib.import_module("torch.distributed.run").get_args_parser()
        options = parser.parse_args(arguments)
        self.script(options.training_script, options.training_script_args)

    def script(self, name: str, arguments: list[str]) -> None:
        paths = [folder / name for folder in (self.here, self.start, ROOT)]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise Wrong(f"there is no script {name}")
        options = parse_only(path, arguments)
        if getattr(options, "faults", ""):
            faults = runpy.run_path(str(path.parent / "fastagg_flower" / "faults.py"))
            try:
                faults["parse"](options.faults)
            except ValueError as error:
                raise Wrong(str(error)) from error

    def uv(self, arguments: list[str]) -> None:
        if arguments[:1] != ["pip"]:
            raise Wrong(f"no check for uv {shlex.join(arguments)}")
        self.pip(arguments[1:])

    def pip(self, arguments: list[str]) -> None:
        command, *wanted = arguments
        checkouts = [word for word in wanted if re.fullmatch(r"\.(\[.+\])?", word)]
        if checkouts:  # setup.py explains why a build needs the option
            project = self.here / "pyproject.toml"
            if "--no-build-isolation" not in wanted or not project.is_file():
                raise Wrong(f"pip {shlex.join(arguments)}: not how a checkout is installed")
            for extra in re.findall(r"[\w-]+", " ".join(checkouts)):
                if not re.search(rf"^{extra} = \[", project.read_text(), re.MULTILINE):
                    raise Wrong(f"pip {shlex.join(arguments)}: no extra {extra}")
            wanted = [word for word in wanted if word not in (*checkouts, "--no-build-isolation")]
        declared = [Requirement(text) for text in importlib.metadata.requires("fastagg") or []]
        extras = {r.name: set[str]() for r in declared}
        for requirement in declared:
            extras[requirement.name] |= requirement.extras
        provided = importlib.metadata.metadata("fastagg").get_all("Provides-Extra") or []
        extras["fastagg"] = {str(name) for name in provided}
        for text in wanted:
            asked = Requirement(text)
            if command != "install" or not asked.extras <= extras.get(asked.name, set()):
                raise Wrong(
                    f"pip {command} {text}: no such extra in fastagg as it was last installed"
                )

    def pre_commit(self, arguments: list[str]) -> None:
        requirements = importlib.metadata.requires("fastagg") or []
        wanted = any(Requirement(text).name == "pre-commit" for text in requirements)
        if arguments != ["install"] or not wanted:
            raise Wrong(f"no check for pre-commit {shlex.join(arguments)}")
        assert (ROOT / ".pre-commit-config.yaml").is_file()

    def ci(self, arguments: list[str]) -> None:
        if arguments or not os.access(ROOT / ".ci" / "run", os.X_OK):
            raise Wrong(".ci/run: expected a program without arguments")
        subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


def blank(info: data.DatasetInfo) -> data.Dataset:
    """Return a data set of the right shapes and labels, whose images take no memory."""
    classes, train, test = 10, 50_000, 100
    x, y = torch.zeros(1, *info.in_shape), torch.arange(train) % classes
    return data.Dataset(
        "blank",
        train_x=x.expand(train, *info.in_shape),
        train_y=y,
        test_x=x.expand(test, *info.in_shape),
        test_y=y[:test],
        num_classes=classes,
    )


def parse_only(path: Path, arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments with the parser of a script, without running its other code.

    The imports of the script may be missing (Flower). Therefore only the part of ``main`` up to
    ``parse_args`` is compiled, with modules of the standard library.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    mains = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for function in mains:
        for index, statement in enumerate(function.body):
            if ".parse_args()" in ast.unparse(statement):
                standard = [
                    node
                    for node in tree.body
                    if isinstance(node, ast.Import | ast.ImportFrom) and from_standard_library(node)
                ]
                body = [*standard, *function.body[: index + 1]]
                names: dict[str, Any] = {"__doc__": ast.get_docstring(tree), "__name__": "parsed"}
                before, sys.argv = sys.argv, [path.name, *arguments]
                try:
                    exec(compile(ast.Module(body, []), str(path), "exec"), names)
                finally:
                    sys.argv = before
                assert isinstance(statement, ast.Assign)
                return names[ast.unparse(statement.targets[0])]
    if arguments:
        raise Wrong(f"{path.name} takes no arguments, got {arguments}")
    return argparse.Namespace()


def from_standard_library(node: ast.Import | ast.ImportFrom) -> bool:
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
    return all(name.partition(".")[0] in sys.stdlib_module_names for name in names)
