"""The page of what was attacked has the counts of the tests that are collected."""

import os

import pytest

from tests.helpers.attacks import FILES, KINDS, PAGE, Collected, filled, tally


def test_the_page_has_the_tests_own_tally(request):
    nodes = request.config.pluginmanager.get_plugin(Collected.__name__).nodes
    if {*FILES} - {node.partition("::")[0] for node in nodes} or os.environ.get("SEEDS", "1") != "1":
        pytest.skip("only with the whole suite, once each")
    counts = tally(nodes)
    assert all(counts)
    assert PAGE.read_text() == filled(PAGE.read_text(), counts), "run: python -m tests.helpers.attacks"


def test_a_test_counts_for_its_kind_by_its_name_without_its_parameters():
    nodes = ["tests/llm/weights/test_hostile.py::test_a[1]", "tests/llm/text/test_grammar.py::test_fine[costly]"]
    counts = dict(zip((kind.name for kind in KINDS), tally(nodes), strict=True))
    assert {name: count for name, count in counts.items() if count} == {
        "damaged or forged weights: safetensors, GGUF, their settings": 1
    }
