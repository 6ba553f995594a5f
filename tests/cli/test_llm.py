import subprocess
import sys

from typer.testing import CliRunner

from fullstride.cli.app import app


def test_inspect_shows_settings_and_tensors(tiny_qwen3):
    result = CliRunner().invoke(app, ["llm", "inspect", str(tiny_qwen3)])
    assert result.exit_code == 0
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in result.stdout.splitlines()]
    assert ["architecture", "qwen3"] in rows
    assert ["tokenizer", "320 tokens"] in rows
    assert ["layers.1.q_norm", "16", "F32"] in rows
    assert ["layers.0.q", "96 x 48", "F32"] in rows
    assert "24 tensors, 64,432 parameters, 0.3 MB as float32" in result.stdout


def test_pull_prints_where_the_file_is(smollm2):
    result = CliRunner().invoke(app, ["llm", "pull", "smollm2"])
    assert result.stdout == f"{smollm2}\n"


def test_mistakes_end_in_one_line(tmp_path):
    result = CliRunner().invoke(app, ["llm", "pull", "smollm"])
    assert (result.exit_code, result.stderr) == (2, "error: model=smollm: expected smollm2; did you mean smollm2?\n")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    result = CliRunner().invoke(app, ["llm", "inspect", str(tmp_path)])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


def test_the_commands_load_no_framework():
    code = "import sys, fullstride.cli.llm; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"jax", "numpy", "torch", "tokenizers", "jinja2"} & set(loaded)


def test_loading_a_model_takes_neither_jax_nor_torch(tiny_llama):
    code = (
        "import sys; from fullstride.llm.weights import load; load(sys.argv[1]).parameters['embed'];"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    args = [sys.executable, "-c", code, str(tiny_llama)]
    loaded = subprocess.run(args, capture_output=True, text=True, check=True).stdout.split()
    assert not {"jax", "torch", "transformers", "gguf", "llguidance"} & set(loaded)
