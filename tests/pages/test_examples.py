"""Every Python block of the README, of the tutorials, how-tos and migration guides is run, in order, page by page."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from fullstride.llm import llm as offline
from fullstride.llm.engine import EngineConfig
from fullstride.measure.pairs import Pair
from fullstride.measure.roofline import COPY_BYTES, GEMM_SIZE, RooflineBound
from fullstride.measure.timing import Timing
from tests.llm.tiny import LLAMA, save_model, save_tokenizer
from tests.pages.outputs import READER, printed, shown, skeleton, visible

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("tutorials", "how-to", "migrate")
PAGES = [ROOT / "README.md", *(page for folder in FOLDERS for page in sorted((DOCS / folder).glob("*.md")))]
NO_BLOCKS = ("index.md", "first-minutes.md")
REAL = offline.LLM


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """An engine of a small random model, for all pages: the real one's programs take a minute to compile."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    save_model(folder, "llama", 0, **LLAMA)
    return REAL(folder, max_length=64, max_sequences=1, max_tokens_per_step=32, block_size=8)


@pytest.fixture
def stand_ins(monkeypatch, tmp_path, request):
    """Replace slow parts of the examples by smaller ones; nothing is fetched."""

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
        found, below = printed(example), shown(example)
        if "llm." in example.parsed:  # another model stands in, which says other things
            assert bool(found) == bool(below)
        elif visible(example):
            assert skeleton(found) == skeleton(below)
    assert len(examples) == page.read_text().count("```python") + page.read_text().count("invisible-code-block: python")


def test_every_tutorial_runs_something():
    assert len(PAGES) > 6
    tutorials = [page for page in PAGES if page.parent.name == "tutorials" and page.name not in NO_BLOCKS]
    assert all("```python" in page.read_text() for page in tutorials)


def test_shown_output_may_differ_in_numbers_and_in_nothing_else(seed):
    random = Random(seed)
    first, second = (f"loss {random.uniform(0, 9):.3f} in  {random.randrange(10**6):,} steps" for _ in range(2))
    assert skeleton(first) == skeleton(second) == "loss # in # steps"
    assert skeleton(first) != skeleton(f"{first}\nand more")
    assert skeleton("b is faster") != skeleton("")


def test_what_a_measurement_may_decide_is_not_compared():
    timing = Timing(1.0, tuple(1.0 + i / 100 for i in range(20)), None)
    fast, slow = RooflineBound(0.5, 0.1), RooflineBound(0.1, 3.0)
    assert skeleton(str(fast.compare(timing))) == skeleton(str(slow.compare(timing)))
    other = replace(timing, samples_ms=tuple(0.7 * ms for ms in timing.samples_ms))
    pairs = [Pair(timing, other), Pair(other, timing), Pair(timing, timing)]
    assert len({skeleton(str(pair)) for pair in pairs}) == 1


def test_a_wrong_block_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n<!--- invisible-code-block: python\nassert x == 2\n-->\n")
    first, second = READER.parse(page)
    first.evaluate()
    with pytest.raises(AssertionError):
        second.evaluate()
