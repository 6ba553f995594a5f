"""Everything that the pages name exists."""

import re
from pathlib import Path

import pytest

from benchmarks.harness.results import SCHEMA
from fullstride.meanflow.checkpoints.folder import FORMAT

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_links_of_a_page_exist(page):
    text = page.read_text()
    named = re.findall(r"`((?:fullstride|tests|docs|benchmarks)/[\w./-]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    # Generated pages are in the site alone, whose build is strict.
    made = [DOCS / "results", DOCS / "reference"] if page.is_relative_to(DOCS) else []
    missing = [(page.parent / link).resolve() for link in links if not (page.parent / link).exists()]
    assert [file for file in missing if file.parent not in made] == []


def test_names_in_the_page_of_additions_are_in_their_files():
    text = (ROOT / "docs" / "how-to" / "add-a-component.md").read_text()
    names = r"[A-Z_]+|build_\w+|corpus_of|choose|register|LossConfig"
    named = re.findall(rf"`({names})` in `([\w./]+\.py)`", text)
    assert len(named) > 7
    assert [(name, file) for name, file in named if name not in (ROOT / file).read_text()] == []


# A thing of each kind, by a name that stands in every file that a new one has to be told to, and where such files are.
TOLD = {'"mnist5k"': "fullstride", '"qwen2"': "fullstride/llm"}
# Names of MeanFlow's components, each of which its own file and its row alone know.
OWN = {"huber": 1, "imf_ema": 0, "multiclass": 1, "dit_b4": 0}


@pytest.mark.parametrize("name", TOLD)
def test_the_page_of_additions_names_every_file_that_knows_the_things_of_a_kind(name):
    text = (ROOT / "docs" / "how-to" / "add-a-component.md").read_text()
    files = [file for file in (ROOT / TOLD[name]).rglob("*.py") if name in file.read_text()]
    assert len(files) > 1
    named = [file.relative_to(ROOT).as_posix() for file in files if file.stem != name.strip('"')]
    assert [file for file in named if file not in text] == []


@pytest.mark.parametrize("name", OWN)
def test_a_component_is_known_to_its_file_and_its_row(name):
    rows = {"objectives.py", "networks.py", "datasets.py", "recipes.py"}
    files = [file for file in (ROOT / "fullstride/meanflow").rglob("*.py") if f'"{name}"' in file.read_text()]
    assert 1 <= len([file for file in files if file.name in rows]) <= 2
    assert len([file for file in files if file.name not in rows]) <= OWN[name]


def test_the_page_of_versions_has_the_numbers_of_the_formats():
    text = (ROOT / "docs" / "reference" / "versions.md").read_text()
    assert f"`format` in `manifest.json` ({FORMAT})" in text
    assert f"`schema` ({SCHEMA})" in text


def test_ci_runs_the_commands_that_contributors_are_told():
    told = re.findall(r"^make (\w+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    run = re.findall(r"^make (\w+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert told == run == ["lint", "docs", "test"]
