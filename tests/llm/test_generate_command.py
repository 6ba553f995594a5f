import re

import pytest
from typer.testing import CliRunner

from fullstride.cli import app
from fullstride.llm.tokenizer import Tokenizer


@pytest.fixture
def generate(tiny_llama):
    def run(*arguments: str, **more):
        return CliRunner().invoke(
            app, ["llm", "generate", "--model", str(tiny_llama), "--max-length", "90", *arguments], **more
        )

    return run


def test_it_streams_and_reports(generate, tiny_llama):
    result = generate("The quick brown fox", "--max-tokens", "30", "--seed", "3", "--temperature", "0.9")
    assert result.exit_code == 0, result.stderr
    again = generate("-", "--max-tokens", "30", "--seed", "3", "--temperature", "0.9", input="The quick brown fox")
    assert again.stdout == result.stdout
    tokenizer = Tokenizer.from_folder(tiny_llama)
    chat = tokenizer.chat([{"role": "user", "content": "The quick brown fox"}])
    count = len(tokenizer.encode(chat, special=False))
    assert re.search(rf"{count} tokens in, \d+ out \((length|stop)\); first after [\d.]+ s", result.stderr)
    raw = generate("The quick brown fox", "--raw", "--max-tokens", "2")
    assert f"{len(tokenizer.encode('The quick brown fox'))} tokens in, 2 out (length)" in raw.stderr


def test_a_mistake_is_one_line(generate):
    result = generate("x", "--max-tokens", "400")
    assert result.exit_code == 2
    assert "max_tokens=400" in result.stderr.splitlines()[-1]
