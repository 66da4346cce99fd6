# SPDX-License-Identifier: Apache-2.0
"""The Python on every page runs as printed, links lead somewhere, and no page or name is missing.

test_flower_page.py tests docs/flower.md, whose blocks are parts of programs. test_flgo_page.py,
test_nvflare_page.py and test_pfl_page.py test pages that need frameworks.
test_code_blocks.py tests all other blocks and checks that there is no Python elsewhere.
"""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.pages.commands import pages
from tests.scripts import HANG

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
OF_FRAMEWORKS = {"flower.md", "flgo.md", "nvflare.md", "pfl.md"}
PAGES = sorted(page for page in DOCS.glob("*.md") if page.name not in OF_FRAMEWORKS)
PAGES.append(ROOT / "README.md")
PAGES_WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]

# One rank, as torchrun would start it; the system chooses the port.
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def program(page: Path) -> str:
    """Return the blocks of a page at their lines, so that a traceback has the page's lines."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for match in BLOCK.finditer(text):
        first = text.count("\n", 0, match.start(1))
        block = match[1].splitlines()
        lines[first : first + len(block)] = block
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    # A separate process, since pages start process groups and set threads. It has the import
    # paths of this process and an empty folder to write to.
    script = tmp_path / page.with_suffix(".py").name
    script.write_text(program(page), encoding="utf-8")
    paths = os.pathsep.join(path for path in [str(ROOT), str(ROOT / "python"), *sys.path] if path)
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(script)],
        cwd=tmp_path,
        env={**os.environ, **ONE_RANK, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert result.returncode == 0, f"{page.name}, line numbers are the page's:\n{result.stderr}"


def test_every_page_is_in_the_navigation() -> None:
    # `make docs` reports this, too, but a contributor who adds a page may not run it.
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = text[text.index("\nnav:") : text.index("\nexclude_docs:")]
    named = re.findall(r": ([\w-]+\.md)$", nav, re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in DOCS.glob("*.md"))
    assert named[:2] == ["index.md", "install.md"]


def test_the_reference_has_the_public_interface() -> None:
    import fastagg

    text = (DOCS / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^::: fastagg\.(\w+)$", text, re.MULTILINE))
    assert set(fastagg.__all__) <= documented


def test_the_reference_has_nothing_under_two_names() -> None:
    # A module without options stands for all that its __all__ names, too.
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    names = []
    for name, options in re.findall(r"^::: ([\w.]+)\n((?: +.*\n)*)", text, re.MULTILINE):
        if name.startswith("fastagg.integrations."):  # needs the framework
            continue
        names.append(name)
        found = pkgutil.resolve_name(name)
        if isinstance(found, ModuleType) and not options:
            names += [f"{name}.{member}" for member in getattr(found, "__all__", ())]
    entries: dict[int, list[str]] = {}
    for name in names:
        entries.setdefault(id(pkgutil.resolve_name(name)), []).append(name)
    assert len(names) > 60
    assert not [several for several in entries.values() if len(several) > 1]


def test_pages_that_list_the_rules_name_every_rule() -> None:
    import fastagg

    for name in ("README.md", "docs/rules.md", "docs/security.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        missing = [rule for rule in fastagg.available() if f"`{rule}`" not in text]
        assert not missing, f"{name} lacks {missing}"


def test_relative_links_lead_somewhere() -> None:
    problems = []
    for page in pages():
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(\s*<?([^)\s>]+)", text):
            path = target.split("#")[0]
            if not re.match(r"[a-z]+:", target) and not (ROOT / page.parent / path).exists():
                problems.append(f"{page} links to {target}")
    assert not problems, "\n".join(problems)
