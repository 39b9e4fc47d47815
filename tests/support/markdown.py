"""A page of the documentation in parts, for tests that follow it: code blocks, rows of tables, prose."""

from __future__ import annotations

import re
from typing import NamedTuple


class Row(NamedTuple):
    """A row of a table.  section: heading above it.  head: of its columns.  cells: texts, without the marks of code."""

    section: str
    head: tuple[str, ...]
    cells: tuple[str, ...]

    def cell(self, column: str) -> str:
        """The cell under a heading."""
        return self.cells[self.head.index(column)]


class Page(NamedTuple):
    """blocks: sources of python by section, in order.  rows: of all tables.  prose: by section, without code blocks and
    tables, each paragraph and bullet on one line and without marks of code and emphasis."""

    blocks: list[tuple[str, str]]
    rows: list[Row]
    prose: dict[str, str]


def cells(line: str) -> tuple[str, ...]:
    return tuple(plain(each) for each in line.strip().strip("|").split("|"))


def plain(text: str) -> str:
    """Text without links' targets, marks of code and emphasis, and line breaks."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"[`*]", "", text).split())


def parse(text: str) -> Page:
    """Parts of a page in markdown."""
    page = Page([], [], {})
    for part in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
        section, _, body = part.partition("\n")
        page.blocks.extend((section, each) for each in re.findall(r"```python\n(.*?)```", body, flags=re.DOTALL))
        body = re.sub(r"```.*?```", "", body, flags=re.DOTALL)
        for table in re.findall(r"(?:^\|.*\n?)+", body, flags=re.MULTILINE):
            head, _, *rows = map(cells, table.splitlines())
            page.rows.extend(Row(section, head, row) for row in rows)
        body = re.sub(r"^\|.*\n?", "", body, flags=re.MULTILINE)
        paragraphs = re.split(r"\n\s*\n|\n(?=- )", body)
        page.prose[section] = "\n".join(filter(None, map(plain, paragraphs)))
    return page
