# SPDX-License-Identifier: Apache-2.0
"""The checks of the built site find what they are for; `make docs` runs them on the whole site."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.pages.commands import ROOT

check_site = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "check_site.py")))
PAGE = '<script src="{up}javascripts/iframe-worker.js"></script><h2 id="a">A</h2>{more}'


def build(
    site: Path, more: str = "", places: tuple[str, ...] = ("index.html", "sub/b.html#a")
) -> None:
    for name, up in (("index.html", ""), ("sub/b.html", "../")):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(PAGE.format(up=up, more=more))
    for name in (check_site.SHIM, check_site.INDEX):
        (site / name).parent.mkdir(exist_ok=True)
    (site / check_site.SHIM).write_text("")
    index = {"docs": [{"location": place} for place in places]}
    (site / check_site.INDEX).write_text(check_site.PREFIX + json.dumps(index))


def test_a_site_that_works_from_a_folder_is_accepted(tmp_path: Path) -> None:
    reference = HEADING.format(name="m.C") + ITEM.format(name="x") + HEADING.format(name="m.x")
    build(tmp_path, '<a href="https://example.org">a link</a><img src="a.svg">' + reference)
    assert check_site.problems(tmp_path) == []


HEADING = '<h3 id="{name}" class="doc doc-heading">{name}</h3>'
ITEM = '<ul><li class="doc-section-item field-body"> <b><code>{name}</code></b> x</li></ul>'


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ('<script src="https://example.org/shim"></script>', "<script> loads https://example.org"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "<link> loads //example.org"),
        ('<iframe src="https://example.org"></iframe>', "<iframe> loads https://example.org"),
        ('<p id="a">twice</p>', "has the id 'a' 2 times"),
        (f"<pre><code>{'x' * 80}\n<span>y</span>{'x' * 80}</code></pre>", "code of 81 characters"),
        (
            HEADING.format(name="m.C") + ITEM.format(name="x") + HEADING.format(name="m.C.x"),
            "describes m.C.x twice",
        ),
        (HEADING.format(name="m.C") + 2 * ITEM.format(name="x"), "describes m.C.x twice"),
    ],
)
def test_a_page_is_refused(tmp_path: Path, more: str, problem: str) -> None:
    build(tmp_path, more)
    found = check_site.problems(tmp_path)
    assert len(found) == 2 and all(problem in text for text in found)


def test_a_search_that_needs_a_server_is_refused(tmp_path: Path) -> None:
    build(tmp_path, places=("gone.html",))
    assert check_site.problems(tmp_path) == [
        f"{check_site.INDEX}: leads to gone.html, which is missing"
    ]
    (tmp_path / check_site.INDEX).write_text("{}")
    assert "at the beginning" in check_site.problems(tmp_path)[0]
    (tmp_path / check_site.INDEX).unlink()
    assert check_site.problems(tmp_path) == [f"{check_site.INDEX}: is missing"]
    build(tmp_path)
    (tmp_path / "index.html").write_text("<p>no shim</p>")
    (found,) = check_site.problems(tmp_path)
    assert "search would need a server" in found


def test_a_style_from_another_host_is_refused(tmp_path: Path) -> None:
    build(tmp_path)
    (tmp_path / "a.css").write_text("p {background: url(https://example.org/a.png)}")
    assert check_site.problems(tmp_path) == ["a.css: loads https://example.org/a.png"]


def test_the_shim_is_the_one_that_the_site_names() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert f"polyfills: [{check_site.SHIM}]" in text
    assert (ROOT / "docs" / check_site.SHIM).is_file()
