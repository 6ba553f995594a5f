import os
import re
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from fullstride.bert.training.settings import TrainSettings
from fullstride.cli.app import app
from fullstride.cli.meanflow_settings import choices, settings
from fullstride.cli.settings import settings_in, show_settings
from fullstride.errors import ConfigError
from fullstride.meanflow.config.presets import KEYS
from fullstride.meanflow.config.recipes import RECIPES
from fullstride.meanflow.config.schema import EmaConfig
from fullstride.settings.fields import written


def shown_in(command):
    """The commands of a group, but for those that are out of its list."""
    return {name: each for name, each in getattr(command, "commands", {}).items() if not each.hidden}


def commands(command, path=()):
    """Every command and group with the words that name it."""
    yield path, command
    for name, each in shown_in(command).items():
        yield from commands(each, (*path, name))


EVERY = dict(commands(get_command(app)))


def page(path: tuple[str, ...], width: int, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0
    return result.stdout


def flowing(text: str) -> str:
    """A page without its line breaks; one after the | between choices parts no name."""
    return " ".join(re.sub(r"\|\s+", "|", text).split())


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_help_fits_every_width_and_breaks_no_name(path, monkeypatch):
    whole = page(path, 100, monkeypatch)
    for width in (40, 60, 80, 120):
        narrow = page(path, width, monkeypatch)
        assert flowing(narrow) == flowing(whole)
        if width > 40:  # there a name may be longer than a line
            assert max(map(len, narrow.splitlines())) < width


def test_help_is_plain_text_where_colour_is_forced():
    environment = os.environ | {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"}
    code = "from fullstride.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "meanflow", "--help"], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.startswith("Usage: ")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout


def test_commands_come_in_the_order_of_use(monkeypatch):
    order = {
        (): "meanflow bert llm runs doctor cache launch",
        ("meanflow",): "demo presets keys plan train sample evaluate consistency average encode export",
        ("llm",): "pull inspect generate serve",
        ("bert",): "train keys evaluate fill export",
    }
    for path, names in order.items():
        found = re.findall(r"^  ([a-z][\w-]*)  ", page(path, 80, monkeypatch), re.MULTILINE)
        assert found == names.split()


def test_every_option_and_command_is_in_exactly_one_section(monkeypatch):
    for path, command in EVERY.items():
        shown = page(path, 100, monkeypatch)
        for parameter in command.params:
            if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False):
                first = next(name for name in parameter.opts if name.startswith("--"))
                assert len(re.findall(rf"^  (?:-\w, )?{first}(?![\w-])", shown, re.MULTILINE)) == 1, (path, first)
        for name in shown_in(command):
            assert len(re.findall(rf"^  {name}(?!\S)", shown, re.MULTILINE)) == 1, (path, name)


def test_train_lists_presets_and_groups_one_a_line(monkeypatch):
    shown = page(("meanflow", "train"), 100, monkeypatch)
    assert re.search(
        r"^  loss= +meanflow, imf, imf_ema, imf_whole, perceptual, alphaflow, tvm, cmt, mse$", shown, re.MULTILINE
    )
    assert all(name in shown for name in RECIPES)
    assert "fullstride meanflow keys" in flowing(shown)


def test_keys_show_defaults_and_meanings():
    result = CliRunner().invoke(app, ["meanflow", "keys", "jvp"])
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["key", "loss.jvp_backend", "loss.jvp_chunk", "loss.jvp_precision"]
    assert re.search(r"^loss.jvp_chunk +0 +most samples that are differentiated at once", result.stdout, re.MULTILINE)
    every = CliRunner().invoke(app, ["meanflow", "keys"]).stdout
    assert set(KEYS) <= {line.split()[0] for line in every.splitlines()}
    assert "steps  " in CliRunner().invoke(app, ["bert", "keys"]).stdout


def test_a_default_is_written_as_the_command_line_takes_it():
    assert [written(value) for value in (True, [0.9, 1e-5], "x", 1e-8)] == ["true", "[0.9,1e-05]", "x", "1e-08"]
    (decays, *_) = settings_in(EmaConfig([0.5, 0.25]))
    assert decays == ("decays", "[0.5,0.25]", "share kept by each optimizer step")


def test_every_key_has_a_meaning():
    listed = [*settings(), *settings_in(TrainSettings())]
    assert [setting.key for setting in listed if not setting.meaning] == []


def test_keys_that_are_not_there_are_an_error():
    with pytest.raises(ConfigError, match="dropuot: no key has this in its name"):
        show_settings(settings(), "dropuot")


def test_presets_are_a_table_and_one_alone_has_its_settings(monkeypatch):
    result = CliRunner().invoke(app, ["meanflow", "presets"])
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["preset", "data", "model", "epochs", "source"]
    assert len(rows) == len(RECIPES)
    for (name, recipe), row in zip(RECIPES.items(), rows, strict=True):
        cells = [name, recipe.settings["data"], recipe.settings["model"], recipe.settings["epochs"]]
        assert row.split()[:4] == cells
        assert row.rstrip().endswith(recipe.source.partition(";")[0])
        alone = CliRunner().invoke(app, ["meanflow", "presets", name]).stdout.splitlines()
        assert alone[1] == f"source: {recipe.source}"
        assert [line.strip() for line in alone[2:]] == [f"{k}={v}" for k, v in recipe.settings.items()]


def test_an_unknown_preset_is_one_line_with_the_nearest():
    result = CliRunner().invoke(app, ["meanflow", "presets", "cifar10_papr"])
    assert result.exit_code == 2
    assert result.stderr.rstrip().endswith("did you mean cifar10_paper?")


def complete(words: str, shell: str) -> list[str]:
    """Return a shell's completions of the last word of a command line."""
    count = len(words.split(" ")) - 1
    environment = {"_FULLSTRIDE_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    environment |= {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    result = CliRunner().invoke(app, [], env=environment, prog_name="fullstride")
    assert result.exit_code == 0, result.output
    return [line.split("\t")[0] for line in result.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fullstride mean", ["meanflow"]),
        ("fullstride meanflow tr", ["train"]),
        ("fullstride meanflow train epo", ["epochs=", "epochs=100"]),
        ("fullstride meanflow train loss", None),
        ("fullstride meanflow train model = song", ["song_unet", "song_unet_tiny"]),
        ("fullstride meanflow train epochs = 3 resume =", ["false", "true"]),
        ("fullstride meanflow train preset = cifar", ["cifar10_paper", "cifar10_v1"]),
        ("fullstride meanflow presets fash", ["fashion_mnist"]),
        ("fullstride bert train model = m", ["mini", "medium"]),
        ("fullstride meanflow train nothing = ", []),
    ],
)
def test_bash_completes_words_which_it_splits_at_the_sign(words, expected):
    found = complete(words, "bash")
    if expected is None:
        assert {"loss=", "loss.meanflow_ratio="} <= set(found)
        expected = [word for word in found if word.startswith("loss") and word.endswith("=")]
    assert found == expected


@pytest.mark.parametrize("shell", ["fish", "zsh"])
def test_other_shells_complete_whole_settings(shell):
    found = " ".join(complete("fullstride meanflow train epochs=3 model=song", shell))
    assert re.findall(r"[\w.=]+song\w*", found) == ["model=song_unet", "model=song_unet_tiny"]


def test_every_key_has_values_or_none_to_offer():
    offered = choices()
    assert set(KEYS) <= set(offered)
    assert offered["loss.use_batch_time"] == ["false", "true"]
    assert offered["data.path"] == []
    assert offered["preset"] == list(RECIPES)


def test_completion_loads_no_framework(tmp_path):
    code = (
        "import sys, atexit; sys.argv = ['fullstride']; heavy = {'torch', 'jax', 'numpy'}\n"
        "atexit.register(lambda: print(*sorted(heavy & set(sys.modules)), file=sys.stderr))\n"
        "from fullstride.cli.app import main; main()"
    )
    words = {"_FULLSTRIDE_COMPLETE": "complete_bash", "COMP_WORDS": "fullstride meanflow train epo", "COMP_CWORD": "3"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | words)
    assert done.stdout.split() == ["epochs=", "epochs=100"]
    assert done.stderr.strip() == ""
