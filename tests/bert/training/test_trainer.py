import gc
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from typing import Any, cast

import jax
import numpy as np
import pytest
from transformers import BertForMaskedLM

from fullstride.bert.data.tokenizer import read_tokenizer
from fullstride.bert.data.tokenizer import trained as trained_wordpiece
from fullstride.bert.model import config
from fullstride.bert.model.bert import Bert
from fullstride.bert.model.fill import fill
from fullstride.bert.model.heads import Heads
from fullstride.bert.model.weights import save_model
from fullstride.bert.training.optimizer import learning_rate, updates
from fullstride.bert.training.runs import TrainedBert, evaluate_command, export, load_trained
from fullstride.bert.training.trainer import Trainer
from fullstride.errors import ConfigError, OutOfMemory, Preempted
from fullstride.runs.folder import read_metrics
from fullstride.step.jax.precision import NAMED, LossScale, Precision
from tests.bert.data.texts import corpus, tokenizer
from tests.bert.runs import QUIET, run, settings, untimed

pytestmark = pytest.mark.usefixtures("tiny_is_small")


@pytest.mark.parametrize(("layout", "stop_at"), [pytest.param("grouped", 2, marks=pytest.mark.thorough), ("flat", 3)])
def test_a_run_that_is_stopped_goes_on_bit_for_bit(texts, tmp_path, layout, stop_at):
    given = f"layout={layout}"
    whole = run(settings(texts, tmp_path / "whole", given))
    with pytest.raises(Preempted, match=f"stopped; saved step {stop_at} in .*resume=true"):
        run(settings(texts, tmp_path / "halves", given), stop_at)
    halves = run(settings(texts, tmp_path / "halves", given, "resume=true"))
    assert halves.state.step == 6
    for a, b in zip(*(jax.tree.leaves(t.state.carry) for t in (whole, halves)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert untimed(tmp_path / "halves") == untimed(tmp_path / "whole")
    lines = untimed(tmp_path / "whole")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "evaluation" in line] == [3, 6]


def test_the_loss_falls_and_what_is_left_is_used(texts, tmp_path):
    more = ("steps=150", "eval_every=75", "log_every=25", "save_every=0", "data.batch_size=16", "accumulate=1")
    trainer = run(settings(texts, tmp_path, *more, "optimizer.lr=2e-2", "ema=0.9"))
    lines = read_metrics(trainer.run)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.3
    scores = [line["evaluation"] for line in lines if "evaluation" in line]
    assert scores[-1]["bits_per_byte"] < scores[0]["bits_per_byte"]
    assert scores[-1]["bytes"] == trainer.data.held_out.size
    assert trainer.step.traces == 1
    again = evaluate_command(trainer.run, [])
    assert asdict(again) == pytest.approx(scores[-1], rel=1e-5)
    assert "bits/byte" in str(again)

    found = load_trained(trainer.run)
    assert found.step == 150
    out = export(found, tmp_path / "hf")
    moved = load_trained(out)
    text = f"{corpus().entries[0].split()[0]} [MASK] [MASK]"
    here, there = (fill(x.model, x.tokenizer, text, 3) for x in (found, moved))
    assert here == there
    assert [len(place) for place in here] == [3, 3]
    assert here[0][0].probability >= here[0][1].probability > 0
    assert "[MASK]" in here[0][0].text
    report = cast(Any, BertForMaskedLM.from_pretrained(out, output_loading_info=True))[1]
    assert not any(report.values())
    with pytest.raises(ConfigError, match=r"no \[MASK\] in it"):
        fill(found.model, found.tokenizer, "none")

    # On from the weights, in another run that then lives without their folder, and keeps their classifier.
    classifier = {"classifier.weight": jax.numpy.ones((2, 16)), "classifier.bias": jax.numpy.ones(2)}
    heads = Heads.of(classifier, {"architectures": ["BertForSequenceClassification"]})
    save_model(found.model.with_heads(heads), out)
    inits = ("eval_every=0", f"model.init={out}", "run_name=on")
    with pytest.raises(Preempted):
        run(settings(texts, tmp_path, *inits), 3)
    assert next(line["loss"] for line in read_metrics(tmp_path / "on")) < losses[0] - 0.2
    shutil.rmtree(out)
    assert run(settings(texts, tmp_path, *inits, "resume=true")).state.step == 6
    found = load_trained(export(load_trained(tmp_path / "on"), tmp_path / "back"))
    assert found.model.heads is not None
    assert found.model.heads.settings == {"architectures": ["BertForSequenceClassification"]}
    for name, x in classifier.items():
        np.testing.assert_array_equal(found.model.heads.arrays[name], x)


def test_skipped_steps_leave_the_schedule_where_it_was_and_the_log_says_so(texts, tmp_path, monkeypatch):
    monkeypatch.setitem(NAMED, "fp16", Precision("float16", LossScale(2.0**22)))
    given = ("precision=fp16", "steps=12", "save_every=0", "eval_every=0")
    # JAX's own attention mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        with pytest.raises(Preempted):
            run(settings(texts, tmp_path, *given), 7)
        trainer = run(settings(texts, tmp_path, *given, "resume=true"))
    lines, before = untimed(tmp_path), 0
    assert [line["step"] for line in lines] == list(range(1, 13))
    for line in lines:
        expected = learning_rate(trainer.settings.optimizer, 12, line["step"] - 1 - before, np)
        assert line["lr"] == pytest.approx(expected, rel=1e-6)
        before += line["skipped_steps"]
    assert 2 <= before < 7
    assert updates(trainer.state.opt_state) == 12 - before


def test_the_weights_of_the_start_do_not_stay(texts, tmp_path):
    before = jax.live_arrays()
    known = set(map(id, before))
    trainer = Trainer(settings(texts, tmp_path, "ema=0"), QUIET)
    gc.collect()
    held = sum(x.nbytes for x in jax.live_arrays() if id(x) not in known)
    weights = sum(4 * x.size for x in jax.tree.leaves(trainer.step.program.abstract().carry.params))
    # Parameters and two moments.
    assert 3 * weights <= held < 3.2 * weights


def test_a_run_is_not_overwritten_by_chance_nor_goes_on_with_other_texts(texts, tmp_path):
    with pytest.raises(Preempted):
        run(settings(texts, tmp_path), 1)
    with pytest.raises(ConfigError, match="already holds a run; continue it"):
        run(settings(texts, tmp_path))
    other = tmp_path / "other.txt"
    other.write_text(texts.read_text().replace("ba", "de"))
    with pytest.raises(ConfigError, match="the texts of data=text_files changed since the run began"):
        run(settings(other, tmp_path, "resume=true"))
    with pytest.raises(Preempted):
        run(settings(texts, tmp_path, "overwrite=true"), 2)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]


def test_settings_that_cannot_be_cost_no_earlier_run(texts, tmp_path):
    kept = tmp_path / "run" / "config.json"
    kept.parent.mkdir()
    kept.write_text("{}")
    for given, reason in {
        "model.attention=cudnn": "attention=cudnn: it needs an NVIDIA GPU",
        "data.path=none": "no such file",
        "device=gpu": "device=gpu: JAX runs on cpu",
        f"model.init={tmp_path}": "no tokenizer.json or vocab.txt in this folder",
        "data.vocab_size=7": "expected at least",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(reason)):
            run(settings(texts, tmp_path, "overwrite=true", given))
    assert kept.read_text() == "{}"


def test_a_run_that_is_replaced_leaves_neither_its_tokenizer_nor_its_sizes(texts, tmp_path):
    run(settings(texts, tmp_path, "steps=3", "eval_every=0"))
    out = export(load_trained(tmp_path / "run"), tmp_path / "hf")
    both = ("steps=3", "eval_every=0", "overwrite=true", "resume=true")
    run(settings(texts, tmp_path, *both, f"model.init={out}"))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["3"]
    run(settings(texts, tmp_path, *both, "data.vocab_size=70"))
    assert read_tokenizer(tmp_path / "run").get_vocab_size() == 70


def test_weights_are_not_exported_over_a_run(texts, tmp_path):
    run(settings(texts, tmp_path, "steps=3", "eval_every=0"))
    kept = (tmp_path / "run" / "config.json").read_text()
    with pytest.raises(ConfigError, match="run: holds a run, and its config.json would be replaced; give another"):
        export(load_trained(tmp_path / "run"), tmp_path / "run")
    assert (tmp_path / "run" / "config.json").read_text() == kept
    out = export(load_trained(tmp_path / "run"), tmp_path / "hf")
    assert export(load_trained(tmp_path / "run"), out) == out  # newer weights


def test_a_setting_that_changes_no_score_is_refused(texts, tmp_path):
    run(settings(texts, tmp_path, "steps=3", "eval_every=0"))
    for given, key in {
        "model=base": "model.size",
        "model.attention=eager": "model.attention",
        "data.tokenizer=minilm": "data.tokenizer",
        "data.vocab_size=7": "data.vocab_size",
        "optimizer.lr=1": "optimizer.lr",
    }.items():
        with pytest.raises(ConfigError, match=f"^{key}: evaluate takes model and tokenizer of .* as they are"):
            evaluate_command(tmp_path / "run", ["data.length=20", given])
    with pytest.raises(ConfigError, match="device=gpu: JAX runs on cpu"):
        evaluate_command(tmp_path / "run", ["device=gpu"])
    # Where it was trained says nothing of where it is scored.
    kept = tmp_path / "run" / "config.json"
    kept.write_text(kept.read_text().replace('"device": "auto"', '"device": "gpu"'))
    assert '"device": "gpu"' in kept.read_text()
    evaluate_command(tmp_path / "run", ["device=cpu", "evaluation.batch_size=3"])


def test_weights_of_another_vocabulary_are_refused(texts, tmp_path):
    sizes = config.BertConfig.named("tiny", vocab_size=90, max_length=24)
    out = export(TrainedBert(Bert(sizes, key=jax.random.key(0)), tokenizer()), tmp_path / "hf")
    larger = tmp_path / "tokenizer.json"
    trained_wordpiece(list(corpus().entries), 95).save(str(larger))
    with pytest.raises(ConfigError, match="has 90 tokens, the tokenizer 95; set data.tokenizer"):
        run(settings(texts, tmp_path, f"model.init={out}", f"data.tokenizer={larger}"))
    with pytest.raises(ConfigError, match="data.length=25: .* takes rows of at most 24 tokens"):
        run(settings(texts, tmp_path, f"model.init={out}", "data.length=25"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 9 bytes.\nmore"),
            "RESOURCE_EXHAUSTED: .* more",
        ),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_step_that_does_not_fit_says_what_would(texts, tmp_path, error, said):
    trainer = Trainer(settings(texts, tmp_path), QUIET)

    def exhausted(*_):
        raise error

    trainer.step.program.jitted = exhausted
    with pytest.raises(OutOfMemory, match=rf"3 rows of 24 tokens at once do not fit \({said}\).*raise accumulate=2"):
        trainer.run_to_end()


def test_a_run_that_died_in_its_first_checkpoint_begins_again(texts, tmp_path):
    sizes = config.BertConfig.named("tiny", vocab_size=90, max_length=24)
    out = export(TrainedBert(Bert(sizes, key=jax.random.key(0)), tokenizer()), tmp_path / "hf")
    given = (f"model.init={out}", "eval_every=0", "save_every=0", "steps=3")
    with pytest.raises(Preempted):
        run(settings(texts, tmp_path, *given), 1)
    checkpoints = tmp_path / "run" / "checkpoints"
    # What orbax leaves of one that was not finished.
    (checkpoints / "1").rename(checkpoints / "1.orbax-checkpoint-tmp-0")
    with pytest.raises(ConfigError, match="this run has no checkpoint yet"):
        load_trained(tmp_path / "run")
    assert run(settings(texts, tmp_path, *given, "resume=true")).state.step == 3
    assert load_trained(tmp_path / "run").step == 3


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run and no weights"):
        load_trained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="config.json is not of this version's bert"):
        load_trained(tmp_path)


def test_two_devices_train_like_one(texts, tmp_path):
    given = ["data.batch_size=8", "model.hidden_dropout=0", "eval_every=0"]
    run(settings(texts, tmp_path / "one", *given))
    command = [sys.executable, "-m", "tests.bert.on_devices", str(texts), str(tmp_path / "two"), *given]
    out = subprocess.run([*command, "sharding=dp"], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines()[-1] == "2 devices"
    for one, two in zip(untimed(tmp_path / "one"), untimed(tmp_path / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-3)
