"""Every Python block of the README, of the tutorials and of a reference page is run, in order, page by page."""

from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from fullstride.bench.floor import COPY_BYTES, GEMM_SIZE
from fullstride.llm import offline
from fullstride.llm.engine import EngineConfig
from tests.llm.tiny import LLAMA, save_model, save_tokenizer

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "step_jax.md", *sorted((DOCS / "tutorials").glob("*.md"))]
REAL = offline.LLM
READER = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()])


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """An engine of a small random model, for all pages: the real one's programs take a minute to compile."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    save_model(folder, "llama", 0, **LLAMA)
    return REAL(folder, max_length=64, max_sequences=1, max_tokens_per_step=32, block_size=8)


@pytest.fixture
def stand_ins(monkeypatch, tmp_path, request):
    """What takes long is smaller, and nothing is fetched."""

    def opened(source: str, **settings):
        assert (source, EngineConfig(**settings).max_length) == ("smollm2", 128)
        return request.getfixturevalue("language_model")

    monkeypatch.setattr(offline, "LLM", opened)
    monkeypatch.setitem(GEMM_SIZE, "cpu", 256)
    monkeypatch.setitem(COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page, stand_ins):
    examples = list(READER.parse(page))
    for example in examples:
        example.evaluate()
    assert len(examples) == page.read_text().count("```python") + page.read_text().count("invisible-code-block: python")


def test_every_tutorial_runs_something():
    assert len(PAGES) > 6
    assert all("```python" in page.read_text() for page in PAGES if page.name != "index.md")


def test_a_wrong_block_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n<!--- invisible-code-block: python\nassert x == 2\n-->\n")
    first, second = READER.parse(page)
    first.evaluate()
    with pytest.raises(AssertionError):
        second.evaluate()
