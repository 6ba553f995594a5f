import json

import pytest
from typer.testing import CliRunner

from benchmarks.cases.llm import attention, options, products
from benchmarks.cli.app import app
from fullstride.llm.config import parameter_shapes
from fullstride.llm.packed.matrix import PackedMatrix


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The command with two small matrices, of the first of which a program has two if they are packed."""
    monkeypatch.setattr(products, "matrices_of", lambda _: {"qkv": (96, 256), "head": (80, 256)})
    monkeypatch.setitem(products.BYTES, "cpu", 30_000)
    monkeypatch.setattr(products, "PLAN", products.GLANCE)

    def run(*arguments):
        given = ["llm-products", "--model", "qwen3-0.6b", *arguments, "--out", str(tmp_path)]
        result = CliRunner().invoke(app, given)
        files = list(tmp_path.glob("llm-products--qwen3-0.6b--bfloat16--*.json"))
        return result, json.loads(files[0].read_text()) if files else None

    return run


def test_products_stand_beside_their_bound_and_what_needs_a_gpu_is_named(measured):
    result, found = measured("--rows", "3", "--formats", "Q4_K")
    assert result.exit_code == 0, result.output
    names = [f"{name}, 3 rows: {way}" for name in ("qkv", "head") for way in ("XLA", "Q4_K")]
    assert [row["name"] for row in found["rows"]] == names
    assert set(found["gate"]) == {f"{way}, {dtype}" for way in ("XLA", "Q4_K") for dtype in ("bfloat16", "float32")}
    assert "skinny_product: not run: expected an NVIDIA GPU" in result.output
    # Two bytes a number, or 144 of 256 numbers in Q4_K.
    for row, size in zip(found["rows"], (96 * 512, 96 * 144, 80 * 512, 80 * 144), strict=True):
        assert row["extra"]["bytes"] == size
        assert row["floor"]["memory_ms"] == pytest.approx(size / found["ceilings"]["bytes"] * 1e3)
        assert row["extra"]["gb_per_second"] == pytest.approx(size / row["timing"]["median_ms"] / 1e6)


def test_a_wrong_product_is_not_timed_and_costs_nothing_that_is_right(measured, monkeypatch):
    right = products.project

    def wrong(x, weight, **given):
        found = right(x, weight, **given)
        return found.at[0, -1].mul(2) if isinstance(weight, PackedMatrix) else found

    monkeypatch.setattr(products, "project", wrong)
    result, found = measured("--rows", "1", "--formats", "fp8")
    assert result.exit_code == 1
    assert "head, 1 row: fp8: relative error" in result.output
    assert [row["name"] for row in found["rows"]] == ["qkv, 1 row: XLA", "head, 1 row: XLA"]


def test_an_unknown_format_and_no_time_are_told_in_a_line(measured):
    result, _ = measured("--formats", "Q5_K")
    assert result.exit_code == 2
    assert "--formats" in result.stderr
    result, found = measured("--seconds", "0")
    assert result.exit_code == 2
    assert found is None
    assert "head: Q8_0: not run: no time" in result.output


@pytest.mark.parametrize("model", options.MODELS)
def test_a_steps_matrices_are_all_of_the_models(model):
    config = products.SHAPES[model]
    *layer, head = (outputs * inputs for outputs, inputs in products.matrices_of(config).values())
    shapes = parameter_shapes(config)
    own = [shape for name, shape in shapes.items() if name.startswith("layers.0.") and len(shape) > 1]
    assert sum(layer) == sum(a * b for a, b in own)
    assert head == config.vocab_size * config.hidden_size


def test_the_targets_have_names():
    assert tuple(attention.TARGETS) == options.TARGETS
