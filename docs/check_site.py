# SPDX-License-Identifier: Apache-2.0
"""Check the built site: `make docs` runs this after mkdocs. Usage: python docs/check_site.py FOLDER

The site must work from a folder, without a server and without a network:

- No page loads a script, a style, a picture or a frame from another host.
- The search index is a script, because browsers give a page of a folder no other file. Each page
  loads the shim that runs the search worker in a frame.
- No page has the same id twice, and the API reference describes nothing twice: a parameter or an
  attribute that stands in a list of its class has no heading of its own.
- No line of code is longer than what the column of text holds in a window of 1280 pixels.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

# What a browser fetches when it shows a page: tag -> attribute. A link of <a> waits for a click.
LOADED = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "object": "data",
    "embed": "src",
}
ELSEWHERE = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
IN_STYLES = re.compile(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)", re.IGNORECASE)
INDEX, PREFIX = "search/search_index.js", "var __index = "
SHIM = "javascripts/iframe-worker.js"
# The column has 656 pixels. A character of 13.6 pixels is at most 8.2 wide (DejaVu Sans Mono).
WIDTH = 80


class Page(HTMLParser):
    """What the checks need: what a page loads, its ids, its code, and what the reference lists.

    described: the full names of the parameters and attributes in lists of the API reference.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[tuple[str, str]] = []
        self.ids: Counter[str] = Counter()
        self.code = ""
        self.described: Counter[str] = Counter()
        self._in_code = False
        self._object = ""  # of the API reference, to which the last heading belongs
        self._item = ""  # the beginning of an item of its lists: the tags that were opened
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if address := values.get(LOADED.get(tag, "")):
            self.loads.append((tag, address))
        if name := values.get("id"):
            self.ids[name] += 1
        self._in_code |= tag == "pre"
        classes = (values.get("class") or "").split()
        if "doc-heading" in classes:
            self._object = values.get("id") or ""
        self._item = "li" if "doc-section-item" in classes else self._item and f"{self._item} {tag}"

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self._in_code = False
            self.code += "\n"

    def handle_data(self, data: str) -> None:
        if self._in_code:
            self.code += data
        if data.strip() and self._item:
            if self._item in ("li b code", "li b code span"):
                self.described[f"{self._object}.{data.strip()}"] += 1
            self._item = ""


def page_problems(file: Path, site: Path) -> list[str]:
    """Return what is wrong in one page."""
    page = Page(file.read_text(encoding="utf-8"))
    found = [
        f"<{tag}> loads {address} from another host"
        for tag, address in page.loads
        if ELSEWHERE.match(address)
    ]
    scripts = {(file.parent / address).resolve() for tag, address in page.loads if tag == "script"}
    # A server shows 404.html under any address, so its links start at the root of the server.
    if file != site / "404.html" and (site / SHIM).resolve() not in scripts:
        found.append(f"does not load {SHIM}: search would need a server")
    found += [f"has the id {name!r} {count} times" for name, count in page.ids.items() if count > 1]
    twice = {name for name, count in page.described.items() if count > 1 or name in page.ids}
    found += [f"describes {name} twice" for name in sorted(twice)]
    found += [
        f"has a line of code of {len(line)} characters, more than {WIDTH}: {line.strip()}"
        for line in page.code.splitlines()
        if len(line) > WIDTH
    ]
    return found


def index_problems(site: Path) -> list[str]:
    """Return what is wrong with the search index and the files that search needs."""
    found = [f"{name}: is missing" for name in (INDEX, SHIM) if not (site / name).is_file()]
    if found:
        return found
    text = (site / INDEX).read_text(encoding="utf-8")
    if not text.startswith(PREFIX):
        return [f"{INDEX}: expected {PREFIX!r} at the beginning"]
    places = [entry["location"] for entry in json.loads(text[len(PREFIX) :])["docs"]]
    missing = {place.partition("#")[0] for place in places}
    missing = {name for name in missing if not (site / (name or "index.html")).is_file()}
    found = [f"{INDEX}: leads to {name}, which is missing" for name in sorted(missing)]
    return found or ([] if places else [f"{INDEX}: is empty"])


def problems(site: Path) -> list[str]:
    """Return what is wrong in the site that was built in the folder `site`."""
    found = index_problems(site)
    for file in sorted(site.rglob("*.html")):
        found += [f"{file.relative_to(site)}: {what}" for what in page_problems(file, site)]
    for file in sorted(site.rglob("*.css")):
        addresses = IN_STYLES.findall(file.read_text(encoding="utf-8"))
        found += [f"{file.relative_to(site)}: loads {address}" for address in addresses]
    return found


def main() -> int:
    (site,) = map(Path, sys.argv[1:])
    found = problems(site)
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
