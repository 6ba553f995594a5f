import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullstride.cli import app
from fullstride.extras import EXTRAS, SHARED, extra_of, how_to_install

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def _brought_by(extra: str) -> set[str]:
    """Distributions that pyproject.toml lists for an extra."""
    return {line.replace(">", "<").partition("<")[0] for line in PROJECT["optional-dependencies"][extra]}


@pytest.mark.parametrize(("package", "extra"), [item for item in EXTRAS.items() if item[0] != "jaxlib"])
def test_a_package_is_listed_by_its_extra_or_one_within(package, extra):
    extras = ("serve", "llm") if extra == "serve" else (extra,)
    named = {name.lower().replace("_", "-") for name in packages_distributions()[package]}
    assert named & set().union(*map(_brought_by, extras))


@pytest.mark.parametrize("extra", ["torch", "jax"])
def test_two_extras_bring_what_is_shared(extra):
    assert set(SHARED) <= _brought_by(extra)


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("jinja2", ["llm", "generate"], "serve"),
        ("jax", ["llm", "serve"], "serve"),
        ("jaxtyping", ["bench", "llm"], "serve"),
        ("jax", ["bench", "train-step"], "jax"),
        ("jax.numpy", ["bert", "train"], "jax"),
        ("safetensors", ["bert", "export"], "jax"),
        ("safetensors", ["experiment", "bert"], "jax"),
        ("safetensors", ["meanflow", "export"], "torch"),
        ("matplotlib", ["report"], "torch"),
        ("modal", ["launch", "llm"], "launch"),
        ("scipy", [], "torch"),
    ],
)
def test_the_extra_has_all_that_the_area_needs(package, command, extra):
    assert extra_of(package, command) == extra


@pytest.mark.parametrize("package", ["jax", "jinja2", "llguidance"])
@pytest.mark.parametrize("command", [["llm", "generate", "x"], ["bench", "llm"]])
def test_the_command_line_knows_the_area(package, command, monkeypatch):
    def lacks(**settings):
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)

    monkeypatch.setattr("fullstride.llm.bench.run", lacks)
    monkeypatch.setattr("fullstride.llm.offline.opened", lambda *_: lacks())
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert result.stderr == f"error: {package} is not installed; {how_to_install('serve')}\n"


def test_no_advice_names_the_project_to_an_index():
    """Whoever takes a name that is not on PyPI has their code run by what installs it."""
    package = Path(sys.modules["fullstride"].__file__ or "").parent
    assert [path for path in package.rglob("*.py") if "pip install 'fullstride" in path.read_text()] == []
