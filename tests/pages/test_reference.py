"""Reference pages: the API lists the packages' exports; equations and commands come from the code."""

import re
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
from docs.hooks.reference import command_line, on_page_content, settings

API = Path(__file__).parents[2] / "docs" / "reference" / "api"


@pytest.mark.parametrize("room", ["jvp", "step.torch", "step.jax", "llm"])
def test_the_api_has_whatever_a_package_exports(room):
    page = (API / f"{room.replace('.', '-')}.md").read_text()
    package = import_module(f"fullstride.{room}")
    exported = {name: getattr(package, name) for name in package.__all__}
    wanted = {f"{o.__module__}.{o.__qualname__}" for o in exported.values() if hasattr(o, "__qualname__")}
    assert wanted <= set(re.findall(r"^::: (\S+)", page, re.MULTILINE))


@pytest.mark.parametrize("page", sorted(API.glob("*.md")), ids=lambda page: page.stem)
def test_whatever_the_api_names_is_there_and_has_a_docstring(page):
    for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        assert getattr(import_module(module), attribute).__doc__


def test_equations_are_mathml():
    inline = r'<span class="arithmatex">\(a &lt; b^2\)</span>'
    block = '<div class="arithmatex">\\[\n\\frac{a}{b}\n\\]</div>'
    typeset = on_page_content(f"<p>of {inline} and {block}</p>")
    assert typeset.count("<math") == typeset.count("</math>") == 2
    assert "<msup>" in typeset
    assert "<mfrac>" in typeset
    assert "&lt;" in typeset or "&#x0003C;" in typeset


def test_commands_and_settings_come_from_the_code():
    assert "`fullstride llm serve`" in command_line()
    assert "loss.weighting" in settings()
    assert str(Path.home()) not in command_line()
