"""The page on data that are not pictures, from file to samples: its commands are run, for a few steps."""

import re
import shlex

from safetensors.torch import load_file
from typer.testing import CliRunner

from fullstride.cli.app import app
from tests.pages.test_examples import DOCS, READER


def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = DOCS / "how-to" / "data-that-are-not-pictures.md"
    for example in READER.parse(page):
        example.evaluate()
    commands = re.search(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    assert commands is not None
    for line in commands[1].replace("\\\n", " ").replace("epochs=300", "epochs=2 device=cpu").splitlines():
        name, *words = shlex.split(line)
        assert name == "fullstride"
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    made = load_file("made/samples.safetensors")
    assert made["samples"].shape == (12, 1, 64)
    assert made["samples"].isfinite().all()
    assert sorted(made["labels"].unique().tolist()) == [0, 1, 2]
    assert (tmp_path / "runs" / "sounds" / "evaluation.json").is_file()
