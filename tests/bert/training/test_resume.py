import pytest

from fullstride.bert.training.runs import CHECKPOINTS, evaluate_command, own_settings, own_sizes, settings_to_train
from fullstride.bert.training.settings import settings_of, validate
from fullstride.bert.training.trainer import Trainer
from fullstride.errors import ConfigError, Preempted
from fullstride.runs.folder import write_config
from fullstride.runs.lock import release
from fullstride.runs.survey import summary
from tests.bert.runs import QUIET, run, settings, untimed

pytestmark = pytest.mark.usefixtures("tiny_is_small")


def test_a_run_goes_on_with_its_own_recipe_and_is_refused_another(texts, tmp_path):
    # As one made by `overwrite=true`, which must not delete itself.
    with pytest.raises(Preempted):
        run(settings(texts, tmp_path, "overwrite=true", "optimizer.lr=3e-3", "optimizer.weight_decay=0.2"), 2)
    folder = (tmp_path / "run").rename(tmp_path / "moved")
    given = [f"output_dir={tmp_path}", "run_name=moved", "resume=true"]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    changes = ["optimizer.lr=1e-3", "model.hidden_dropout=0", "accumulate=1", "data.batch_size=8", "steps=9"]
    message = (
        r"moved: cannot resume with other settings \(data.batch_size: 6 -> 8, model.hidden_dropout: 0.1 -> 0.0, "
        r"optimizer.lr: 0.003 -> 0.001, accumulate: 2 -> 1\); use another run_name"
    )
    with pytest.raises(ConfigError, match=message):
        run(settings_to_train([*given, *changes]))
    with pytest.raises(ConfigError, match=r"data.name: text_files -> python_docs"):
        run(settings_of(given))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before

    trainer = run(settings_to_train([*given, "steps=4", "layout=grouped", "log_every=2"]))
    assert trainer.state.step == 4
    expected = settings(texts, tmp_path, "optimizer.lr=3e-3", "optimizer.weight_decay=0.2", *given[1:])
    expected.steps, expected.layout, expected.log_every = 4, "grouped", 2
    assert own_settings(folder) == expected
    assert [line["step"] for line in untimed(tmp_path, "moved") if "loss" in line] == [1, 2, 4]


def test_fewer_steps_than_were_made_are_refused(texts, tmp_path):
    with pytest.raises(Preempted):
        run(settings(texts, tmp_path, "eval_every=0"), 4)
    assert (summary(tmp_path / "run").state, summary(tmp_path / "run").step) == ("stopped", 4)
    given = [f"output_dir={tmp_path}", "run_name=run", "resume=true"]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"steps=3: .*run has made 4; expected 4 or more"):
        run(settings_to_train([*given, "steps=3"]))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert run(settings_to_train([*given, "steps=4"])).state.step == 4
    assert run(settings(texts, tmp_path, "overwrite=true", "resume=true", "steps=3", "eval_every=0")).state.step == 3


def test_settings_of_a_run_that_begins_or_is_replaced_are_those_given(texts, tmp_path):
    given = [f"output_dir={tmp_path}", "run_name=run"]
    assert settings_to_train([*given, "resume=true"]) == settings_of([*given, "resume=true"])
    with pytest.raises(ConfigError, match=r"optimizer.warmup_steps=100: expected fewer than steps=9"):
        validate(settings_to_train([*given, "resume=true", "steps=9"]))
    (tmp_path / "run").mkdir()
    write_config(tmp_path / "run", settings(texts, tmp_path))
    replaced = [*given, "resume=true", "overwrite=true"]
    assert settings_to_train(replaced) == settings_of(replaced)
    assert settings_to_train([*given, "resume=true"]) == settings(texts, tmp_path, "resume=true")
    # Nothing was learned by that recipe yet.
    other = settings_to_train([*given, "resume=true", "optimizer.lr=1e-3", "steps=3"])
    assert run(other).state.step == 3


@pytest.mark.parametrize("left", ['{"steps": 1', "[]", ""])
def test_a_file_of_a_run_that_was_copied_in_part_is_named(tmp_path, left):
    (tmp_path / CHECKPOINTS / "4").mkdir(parents=True)
    for name in ("config.json", "model.json"):
        (tmp_path / name).write_text(left)
    for read, name in ((own_settings, "config"), (own_sizes, "model")):
        with pytest.raises(ConfigError, match=rf"{name}.json: incomplete or damaged \(.*\); copy it again"):
            read(tmp_path)


@pytest.mark.thorough
def test_without_a_checkpoint_the_tokenizer_is_the_one_that_is_asked_for_now(texts, tmp_path):
    release(Trainer(settings(texts, tmp_path), QUIET).run)
    trainer = run(settings(texts, tmp_path, "resume=true", "data.vocab_size=60", "steps=1", "optimizer.warmup_steps=0"))
    fresh = run(
        settings(texts, tmp_path, "run_name=fresh", "data.vocab_size=60", "steps=1", "optimizer.warmup_steps=0")
    )
    sizes = [one.data.tokenizer.get_vocab_size() for one in (trainer, fresh)]
    assert sizes[0] == sizes[1] <= 60


def test_other_texts_are_not_scored_as_the_runs_own(texts, tmp_path):
    own = tmp_path / "own.txt"
    own.write_text(texts.read_text())
    run(settings(own, tmp_path, "steps=3", "eval_every=0"))
    scores = evaluate_command(tmp_path / "run", [])
    lines = own.read_text().splitlines()
    own.write_text("\n".join(lines[: len(lines) // 2]))
    with pytest.raises(ConfigError, match="the texts changed since training"):
        evaluate_command(tmp_path / "run", ["data.length=20"])
    assert evaluate_command(tmp_path / "run", [f"data.path={own}"]) != scores
    assert evaluate_command(tmp_path / "run", [f"data.path={texts}"]) == scores
