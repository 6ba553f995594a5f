"""Hook of mkdocs: pages of results next to the documentation's, generated with the site."""

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # this clone's code, whichever is installed

from benchmarks.report.frame import read_results  # noqa: E402
from benchmarks.report.pages import pages, title_of  # noqa: E402

_made: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> None:
    """Make the pages, and add them to the section of results."""
    _made.clear()
    _made.update(pages(read_results(Path(config.extra.get("results") or ROOT / "benchmarks" / "results"))))
    entries = [{title_of(name): _path(name)} for name in _made]
    for section in config.nav or []:
        if "Results" in section:
            section["Results"].append({"Every result": entries})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages to the site's files."""
    for name, text in _made.items():
        files.append(File.generated(config, _path(name), content=text))


def _path(name: str) -> str:
    return "results/every-result.md" if name == "index" else f"results/{name}.md"
