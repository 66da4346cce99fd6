# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: add the repository's other files, and convert formulas to MathML.

Pages link to files outside of docs/ (results, benchmarks, sources) by relative links, which work in
a checkout. The site gets a copy of each such file under repository/; markdown becomes a page.
Formulas become MathML, which browsers show without help.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_COPIES = "repository"
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add every file outside of docs/ that a page links to, and the files these link to."""
    root, docs = _root(config), Path(config.docs_dir)
    todo = [Path(file.abs_src_path or "") for file in files.documentation_pages()]
    while todo:
        page = todo.pop()
        text = _FENCED.sub("", page.read_text(encoding="utf-8"))
        for _, _, link in _LINK.findall(text):
            target = _target(page, link)
            if target is None or not target.is_file() or docs in target.parents:
                continue
            uri = f"{_COPIES}/{target.relative_to(root).as_posix()}"
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(target)))
                if target.suffix == ".md":
                    todo.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of docs/ to the copies; reduce links to folders to their text."""
    root, docs = _root(config), Path(config.docs_dir)
    here = posixpath.dirname(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        mark, text, link = match.groups()
        target = _target(Path(page.file.abs_src_path or ""), link)
        if target is None:
            return match.group()
        if target.is_dir():
            return text
        base = docs if docs in target.parents else root
        uri = target.relative_to(base).as_posix()
        if base == root:
            uri = f"{_COPIES}/{uri}"
        anchor = link.partition("#")[2]
        return f"{mark}[{text}]({posixpath.relpath(uri, here or '.')}{anchor and '#' + anchor})"

    parts = re.split(f"({_FENCED.pattern})", markdown, flags=_FENCED.flags)
    return "".join(part if part.startswith("```") else _LINK.sub(rewrite, part) for part in parts)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert formulas from LaTeX to MathML."""

    def convert(match: re.Match[str]) -> str:
        latex = match[3].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        display = "block" if match[2] == "[" else "inline"
        mathml = latex2mathml.converter.convert(latex.strip(), display=display)
        if "\\" in mathml:
            raise PluginError(f"{page.file.src_uri}: not understood in the formula {latex!r}")
        return mathml

    return _FORMULA.sub(convert, html)


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent


def _target(page: Path, link: str) -> Path | None:
    """Return the file or folder behind a relative link; a folder with a README is its README."""
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    target = Path(os.path.normpath(page.parent / path))
    readme = target / "README.md"
    return readme if readme.is_file() else target
