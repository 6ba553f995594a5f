import importlib
import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fullstride import extras
from fullstride.extras import AREAS, advice, area_of, extra_for, how_to_install, requirements
from tests.helpers.only_installed import PROJECT, brought_by, lines_of, run_only

# Every command that needs an extra, and the area that it is of.
COMMANDS = {
    "meanflow demo": "meanflow",
    "meanflow train epochs=1": "meanflow",
    "meanflow sample runs/x": "meanflow",
    "meanflow plan": "meanflow",
    "benchmarks overfit": "meanflow",
    "benchmarks meanflow-step": "benchmarks",
    "benchmarks jvp-norms": "benchmarks.cases.jvp",
    "benchmarks train-step": "benchmarks.cases.step_jax",
    "bert train": "bert",
    "bert fill [MASK] --run x": "bert",
    "benchmarks bert": "benchmarks.experiments.bert",
    "llm generate x": "llm",
    "llm inspect x": "llm",
    "llm serve --model x": "llm.server",
    "benchmarks llm": "benchmarks.cases.llm",
    "benchmarks report runs x": "benchmarks.report",
    "launch modal -- llm serve": "launch",
    "launch slurm -- llm serve": "launch",
    "launch skypilot -- llm serve": "launch",
    "launch sync": "launch",
}
FREE = ["meanflow presets", "llm serve --help", "launch local --dry-run -- llm serve"]


@pytest.fixture(autouse=True)
def anew():
    requirements.cache_clear()
    yield
    requirements.cache_clear()


@pytest.fixture
def installed(monkeypatch):
    """Pretend that fullstride's metadata lists some requirements, and that some packages alone are installed."""

    def pretend(lines: list[str], *packages: str):
        def version(name: str) -> str:
            if name not in packages:
                raise metadata.PackageNotFoundError(name)
            return "1.0"

        monkeypatch.setattr(metadata, "requires", lambda name: lines)
        monkeypatch.setattr(metadata, "version", version)

    return pretend


def test_every_command_names_all_that_its_area_lacks_and_nothing_else_needs_an_extra():
    code = """
from typer.testing import CliRunner
from benchmarks.cli.app import app as benchmarks
from fullstride.cli.app import app
def run(first, *rest):
    return CliRunner().invoke(benchmarks, rest) if first == "benchmarks" else CliRunner().invoke(app, [first, *rest])
ended = {line: run(*line.split()) for line in sys.argv[1:]}
print(json.dumps({line: [result.exit_code, result.stderr] for line, result in ended.items()}))
"""
    done = run_only(lines_of(""), code, *COMMANDS, *FREE)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [said[line][0] for line in FREE] == [0] * len(FREE)
    for line, module in COMMANDS.items():
        area = area_of(module if module.startswith("benchmarks") else f"fullstride.{module}")
        names = sorted(area.part or brought_by(lines_of(area.extra), deep=False) - brought_by(lines_of("")))
        told = f"error: {area.module} needs packages that are not installed: {', '.join(names)}"
        assert said[line] == [2, f"{told}; {how_to_install(area.extra)}\n"]


def test_requirements_are_those_of_this_machine_and_of_the_extras_within(installed):
    other = "win32" if sys.platform != "win32" else "linux"
    lines = [
        "rich>=13",
        "jax>=0.10; extra == 'jax'",
        f"pywin32; sys_platform == '{other}' and extra == 'jax'",
        "fullstride[jax]; extra == 'llm'",
        "Jinja2>=3; extra == 'llm'",
        "torch; extra == 'torch'",
    ]
    installed(lines)
    assert [need.name for need in requirements()] == ["rich"]
    assert {need.name for need in requirements("llm")} == {"rich", "jax", "Jinja2"}


def test_an_area_lacks_what_is_not_installed_of_its_part(installed):
    installed(["rich", "jinja2; extra == 'torch'", "torch; extra == 'torch'"], "rich")
    assert area_of("fullstride.meanflow.objective.loss").missing() == ["jinja2", "torch"]
    assert area_of("fullstride.jvp.transform").missing() == ["torch"]
    installed(["rich", "torch; extra == 'torch'"], "torch")
    requirements.cache_clear()
    assert area_of("fullstride.step.torch").missing() == ["rich"]


def test_parts_and_extras_are_those_of_the_project():
    listed = {name: " ".join(lines) for name, lines in PROJECT["optional-dependencies"].items()}
    for area in AREAS:
        assert all(f"{name}>" in listed[area.extra] for name in area.part), area


def _failing(load) -> ModuleNotFoundError:
    """The error of something that an area of this package does."""
    calls = {"__name__": "fullstride.meanflow.fake", "load": load}
    exec("def begin():\n    load()", calls)
    with pytest.raises(ModuleNotFoundError) as caught:
        calls["begin"]()
    return caught.value


def test_a_module_that_a_user_named_is_not_taken_for_a_package_that_is_missing(installed):
    installed(["torch; extra == 'torch'"])
    assert advice(_failing(lambda: importlib.import_module("no_such_module"))) is None
    error = _failing(lambda: exec("import no_such_module", {"__name__": "fullstride.meanflow.other"}))
    assert str(advice(error)).startswith("fullstride.meanflow needs packages that are not installed: torch; ")


def test_without_metadata_the_one_package_that_is_known_to_be_missing_is_named(monkeypatch):
    def requires(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    error = _failing(lambda: exec("import no_such_module", {"__name__": "fullstride.meanflow.other"}))
    assert f"not installed: no_such_module; {how_to_install('torch')}" in str(advice(error))


def test_an_area_that_lacks_nothing_has_no_advice_but_an_extra(installed):
    installed(["torch; extra == 'torch'"], "torch")
    error = _failing(lambda: exec("import no_such_module", {"__name__": "fullstride.meanflow.other"}))
    assert advice(error) is None
    assert extra_for(error) == "torch"


def test_checks_of_types_while_the_tests_run_are_not_displaced():
    assert "jaxtyping" in type(extras.__loader__).__module__


def test_no_advice_names_the_project_to_an_index():
    """Whoever registers a free name on PyPI gets their code run by everyone who installs it."""
    package = Path(extras.__file__).parent
    assert [path for path in package.rglob("*.py") if "pip install 'fullstride" in path.read_text()] == []
