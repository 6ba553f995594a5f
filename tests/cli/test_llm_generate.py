import re
import shutil
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fullstride.cli import llm_generate as generate_command
from fullstride.cli.app import app
from fullstride.llm import LLM, SamplingParams
from fullstride.llm.engine import Engine
from fullstride.llm.text.tokenizer_folder import read_folder
from fullstride.llm.weights import load

pytestmark = pytest.mark.usefixtures("compiled_soon")


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
    tokenizer = read_folder(tiny_llama)
    chat = tokenizer.chat([{"role": "user", "content": "The quick brown fox"}])
    count = len(tokenizer.encode(chat, special=False))
    assert re.search(rf"{count} tokens in, \d+ out \((length|stop)\); first after [\d.]+ s", result.stderr)
    raw = generate("The quick brown fox", "--raw", "--max-tokens", "2")
    assert f"{len(tokenizer.encode('The quick brown fox'))} tokens in, 2 out (length)" in raw.stderr


def test_more_prompts_are_turns_of_one_conversation(generate, tiny_llama):
    turns = ["The quick", "brown", "fox"]
    result = generate(*turns, "--max-tokens", "4", "--system", "Be brief.", "--max-length", "160")
    assert result.exit_code == 0, result.stderr
    asked = [block.partition("\n\n") for block in re.split(r"^> ", result.stdout, flags=re.MULTILINE)[1:]]
    assert [turn for turn, _, _ in asked] == turns
    model = LLM(str(tiny_llama), max_sequences=1, max_length=160)
    talk = [{"role": "system", "content": "Be brief."}]
    for number, (turn, _, printed) in enumerate(asked):
        talk.append({"role": "user", "content": turn})
        (output,) = model.chat(talk, SamplingParams(temperature=0.0, max_tokens=4))
        assert printed == output.outputs[0].text + ("\n\n" if number < len(turns) - 1 else "\n")
        talk.append({"role": "assistant", "content": output.outputs[0].text})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "400"], "max_tokens=400"),
        (["--raw", "--system", "Be brief."], "--raw and --system are both given"),
        (["y", "--raw"], "--raw with 2 prompts"),
        (["--top-p", "2"], "top_p=2.0: expected above 0, at most 1"),
        (["--tensor-parallel-size", "64"], "tensor_parallel_size=64: there are"),
    ],
)
def test_a_mistake_is_one_line(generate, arguments, message):
    result = generate("x", *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line


def test_a_prompt_from_a_closed_stdin_is_refused(generate, monkeypatch):
    monkeypatch.setattr(generate_command, "sys", SimpleNamespace(stdin=None, stderr=sys.stderr))
    result = generate("-", "--raw")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: PROMPT=-: stdin is closed")


def test_a_prompt_without_room_is_refused_before_anything_is_compiled(generate, tiny_llama, monkeypatch):
    monkeypatch.setattr(Engine, "__init__", lambda *_: pytest.fail("an engine was made"))
    longest = load(tiny_llama).config.max_position
    for arguments, problem in (
        (["--max-length", "4"], r"the prompt has \d+ tokens: expected at most 3, with one to follow"),
        (["--max-tokens", "89"], r"\d+ tokens of prompt and max_tokens=89 are \d+: expected at most 90 in all"),
    ):
        result = generate("The quick brown fox", *arguments)
        assert result.exit_code == 2
        assert re.fullmatch(rf"error: {problem}; --max-length takes up to this model's {longest}\n", result.stderr)
    empty = generate("", "--raw")
    assert (empty.exit_code, empty.stderr) == (2, "error: the prompt is empty: expected at least one token\n")


def test_a_model_without_a_template_is_asked_for_raw_text(generate, tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    result = generate("x", "--model", str(folder))
    assert result.exit_code == 2
    assert "give --raw" in result.stderr.splitlines()[-1]
    # Without --max-tokens the answer has what room there is.
    report = generate("x", "--model", str(folder), "--raw", "--seed", "1").stderr
    assert re.search(r"out \(stop\)", report) or sum(map(int, re.findall(r"(\d+) (?:tokens in|out)", report))) == 90
