"""Pages taken apart by Python's own parser, and tables of Markdown by their cells."""

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "hr", "input"}
# Elements that make a browser fetch or run something.
FETCHING = {"script", "link", "img", "iframe", "object", "embed", "image", "video", "audio", "base"}


class Page(HTMLParser):
    """Tags, tables, figures, names and targets of a page.

    Attributes:
        errors: tags that were not closed, or closed out of turn.
        tables: a list of rows of cells for each table.
        figures: what each figure holds, its caption and its drawing's label.

    """

    def __init__(self, text: str):
        """Read the whole page."""
        super().__init__()
        self.open: list[str] = []
        self.errors: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.figures: list[dict[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        self.errors += [f"{tag} left open" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        """Note a tag."""
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """Note a tag that closes itself."""
        found = {key: value or "" for key, value in attrs}
        self.tags.add(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.targets += [found[key] for key in ("href", "src", "xlink:href", "action", "data") if key in found]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        elif tag == "figure":
            self.figures.append({"caption": "", "label": ""})
        elif tag == "svg":
            self.figures[-1]["label"] = found.get("aria-label", "")

    def handle_endtag(self, tag):
        """Close a tag."""
        if not self.open or self.open.pop() != tag:
            self.errors.append(f"</{tag}> out of turn at {self.getpos()}")

    def handle_data(self, data):
        """Give text to the innermost table cell or caption."""
        self.text += data
        if "figcaption" in self.open:
            self.figures[-1]["caption"] += data
        elif self.tables and {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


def addresses(text: str) -> set[str]:
    """Return every address that a browser could open; the namespaces of SVG are not among them."""
    return {found for found in re.findall(r"(?:https?:)?//[\w.]+[^\"' <)]*", text) if "www.w3.org" not in found}


def cells_by_row(table: object) -> dict[str, list[str]]:
    """Return the cells after the first in every row of a Markdown table, header included, by its first cell."""
    lines = [_split(line.removeprefix("|")) for line in str(table).splitlines() if line.startswith("|")]
    return {first: cells for first, *cells in lines}


def _split(line: str) -> list[str]:
    return [cell.strip() for cell in line.removesuffix("|").split("|")]


def as_number(cell: str) -> float:
    """Return the number of a cell, which may be bold, marked, or have thousands separators."""
    return float(cell.removesuffix(" (!)").strip("*").replace(",", ""))
