"""Sizes of pages, columns of code, first words of docstrings, and the field's words where their users look."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GENERATED = {"first-minutes.md", "licences.md"}
HIDDEN = re.compile(r"<!---.*?-->", re.DOTALL)
TABLE = re.compile(r"<!-- table: .*?<!-- end of table -->", re.DOTALL)
FENCE = re.compile(r"^```(?:python|py|bash|toml)\n(.*?)^```", re.DOTALL | re.MULTILINE)
DANGLING = ("Of", "What", "Whether", "Likewise", "As", "The same")
WORDS = {
    "KV cache": "explanation/life-of-a-request.md",
    "block table": "explanation/life-of-a-request.md",
    "continuous batching": "explanation/life-of-a-request.md",
    "chunked prefill": "explanation/life-of-a-request.md",
    "time to first token": "results/language-models.md",
    "throughput": "results/language-models.md",
    "tensor parallel": "explanation/tensor-parallel.md",
    "roofline": "explanation/roofline-bounds.md",
    "CUDA graph": "explanation/captured-steps.md",
    "forward-mode": "explanation/forward-derivatives.md",
    "jvp_flash_attention": "migrate/from-jvp-flash-attention.md",
    "filter_jit": "migrate/from-filter-jit.md",
}


def written(page: Path) -> str:
    """Return a page without what is made from results."""
    return TABLE.sub("", page.read_text())


def prose(page: Path) -> str:
    """Return the sentences of a page: no code, no tables."""
    text = HIDDEN.sub("", re.sub(r"^```.*?^```", "", written(page), flags=re.DOTALL | re.MULTILINE))
    return "\n".join(line for line in text.splitlines() if not line.startswith(("|", ":::")))


@pytest.mark.parametrize(("name", "most"), [("README.md", 7_500), ("CHANGELOG.md", 4_000)])
def test_the_first_pages_are_short(name, most):
    assert len((ROOT / name).read_bytes()) <= most


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_is_read_in_minutes(page):
    assert page.name in GENERATED or len(written(page).encode()) <= 8_000


def test_all_pages_together_are_read_in_an_afternoon():
    assert sum(len(prose(page).encode()) for page in PAGES if page.name not in GENERATED) <= 180_000


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_code_fits_its_column(page):
    if page.name not in GENERATED:
        assert [
            line for block in FENCE.findall(page.read_text()) for line in block.splitlines() if len(line) > 88
        ] == []


@pytest.mark.parametrize(("word", "page"), WORDS.items())
def test_the_fields_words_are_where_their_users_look(word, page):
    assert word.lower() in (DOCS / page).read_text().lower()


def docstrings(*folders: str) -> Iterator[str]:
    """The docstrings of folders' code."""
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if documented and (text := ast.get_docstring(node)):
                yield text


def test_docstrings_begin_with_a_noun_or_a_verb():
    pattern = re.compile(rf"({'|'.join(DANGLING)})\b")
    assert sum(bool(pattern.match(text)) for text in docstrings("fullstride", "benchmarks", "tests")) <= 60
