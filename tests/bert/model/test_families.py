"""Encoders of other families, and of fine-tunes, held against transformers' on random weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from safetensors.torch import load_file

from fullstride.bert.model.config import BertConfig
from fullstride.bert.model.weights import load, save_model
from fullstride.bert.training.loss import mlm_loss
from fullstride.errors import ConfigError
from fullstride.step.jax import TrainStep
from tests.bert.models import batch_of, ids, loss_of, run, scores

VOCABULARY, LENGTH = 53, 23
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 27,
}
LABELS: dict[str, Any] = {"id2label": {0: "no", 1: "yes", 2: "perhaps"}, "label2id": {"no": 0, "yes": 1, "perhaps": 2}}
THETAS = {"full_attention": 90.0, "sliding_attention": 7.0}
# By family: the beginning of transformers' names, and its settings.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SIZES),
    # Positions begin at 4: rows have at most 23 tokens.
    "roberta": ("Roberta", {**SIZES, "type_vocab_size": 1, "pad_token_id": 3}),
    "distilbert": (
        "DistilBert",
        {"vocab_size": VOCABULARY, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 20}
        | {"max_position_embeddings": 27},
    ),
    # Heads of 4; the first and last of four layers are global, the others see 3 tokens on each side.
    "modernbert": (
        "ModernBert",
        {**SIZES, "num_hidden_layers": 4, "pad_token_id": 50, "local_attention": 7, "norm_eps": 1e-4}
        | {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
        | {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in THETAS.items()}},
    ),
}
LENGTHS = np.array([LENGTH, 9, 1])
REAL = np.arange(LENGTH) < LENGTHS[:, None]


def made(family: str, kind: str, seed: int, **more: Any) -> Any:
    """A model of transformers with random weights in every tensor."""
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**sizes, **more)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}{kind}")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    return model


def text(seed: int, pad: int | None) -> np.ndarray:
    """Rows in which only padding is the padding token: transformers count RoBERTa's positions by it."""
    tokens = np.array(ids(seed, (3, LENGTH), VOCABULARY))
    tokens[tokens == pad] = 5
    return np.where(REAL, tokens, pad or 0)


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name != "bert"])
def both(request, tmp_path_factory):
    """A family's model with the masked language model's head, theirs and ours, and the folder between them."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = made(request.param, "ForMaskedLM", 7)
    theirs.save_pretrained(folder, max_shard_size="6KB")
    return theirs, load(folder), folder


def test_hidden_states_and_scores_are_those_of_transformers(both, seed):
    theirs, ours, folder = both
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    tokens = text(seed, theirs.config.pad_token_id)
    with torch.no_grad():
        mask = torch.tensor(REAL.astype(int))
        out = theirs(torch.tensor(tokens), attention_mask=mask, output_hidden_states=True)
    hidden = run(ours, jnp.asarray(tokens, jnp.int32), lengths=jnp.asarray(LENGTHS, jnp.int32))
    for mine, wanted in ((hidden, out.hidden_states[-1].numpy()), (scores(ours, hidden), out.logits.numpy())):
        assert np.abs(np.asarray(mine) - wanted)[REAL].max() < 2e-5 * np.abs(wanted).max()


def test_packed_texts_are_as_if_each_had_a_row_of_its_own(both, seed):
    _, ours, _ = both
    tokens = jnp.asarray(text(seed, None), jnp.int32)
    segments = np.repeat([[1] * 9 + [2] * 1 + [3] * 10 + [0] * 3], 3, axis=0)
    packed = np.asarray(run(ours, tokens, segments=jnp.asarray(segments, jnp.int32)))
    for start, stop in ((0, 9), (9, 10), (10, 20)):
        alone = jnp.pad(tokens[:, start:stop], ((0, 0), (0, LENGTH - stop + start)))
        lengths = jnp.full(3, stop - start, jnp.int32)
        found = np.asarray(run(ours, alone, lengths=lengths))[:, : stop - start]
        np.testing.assert_allclose(packed[:, start:stop], found, atol=3e-5 * np.abs(found).max())


def test_training_goes_on_and_transformers_reads_it(both, tmp_path):
    theirs, ours, _ = both
    step = TrainStep(mlm_loss, optax.sgd(1e-2), ours, has_aux=True)
    state, batch = step.init(), batch_of(0, ours.config, length=LENGTH)
    before = float(loss_of(ours, batch)[0])
    for _ in range(4):
        state, _ = step(state, batch)
    assert step.finish()["loss"] < before
    save_model(state.model, tmp_path)
    again, report = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert again.config.max_position_embeddings == 27
    assert again.config.pad_token_id == theirs.config.pad_token_id or ours.config.family != "roberta"
    tokens = text(1, theirs.config.pad_token_id)
    with torch.no_grad():
        out = again(torch.tensor(tokens), attention_mask=torch.tensor(REAL.astype(int))).logits.numpy()
    hidden = run(state.model, jnp.asarray(tokens, jnp.int32), lengths=jnp.asarray(LENGTHS, jnp.int32))
    assert np.abs(np.asarray(scores(state.model, hidden)) - out)[REAL].max() < 2e-5 * np.abs(out).max()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["ForSequenceClassification", "ForTokenClassification"])
def test_heads_of_a_fine_tune_are_listed_kept_and_written_back(family, kind, tmp_path, capsys):
    theirs = made(family, kind, 1, **LABELS)
    theirs.save_pretrained(tmp_path / "given")
    given = load_file(tmp_path / "given" / "model.safetensors")
    ours = load(tmp_path / "given")
    listed = capsys.readouterr().err
    assert "kept as they are, not used by the encoder: classifier" in listed
    assert ours.heads is not None
    assert ours.config.pooler == any(".pooler." in name for name in given)
    # Arrays of the encoder alone are trained and decayed.
    smaller = jax.tree.map(lambda x: x if isinstance(x, bool) else x * 0.5, ours)
    save_model(smaller, tmp_path / "back")
    again, report = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report.values())
    assert again.config.id2label == LABELS["id2label"]
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == given.keys()
    for name, x in given.items():
        part = 1 if name in ours.heads.arrays else 0.5
        np.testing.assert_allclose(back[name], part * x, rtol=1e-6, err_msg=name)
        assert (part == 1) == (name in listed)


def test_a_head_for_masked_tokens_is_new_beside_those_that_are_kept(tmp_path):
    made("roberta", "ForTokenClassification", 2).save_pretrained(tmp_path / "given")
    ours = load(tmp_path / "given", key=jax.random.key(0))
    save_model(ours, tmp_path / "both")
    names = load_file(tmp_path / "both" / "model.safetensors").keys()
    assert {"classifier.weight", "lm_head.bias", "lm_head.dense.weight"} <= names
    again = load(tmp_path / "both")
    tokens = ids(0, (3, LENGTH), VOCABULARY)
    np.testing.assert_array_equal(*(scores(model, run(model, tokens)) for model in (ours, again)))


def test_a_missing_shard_is_named(both, tmp_path):
    *_, folder = both
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    shard = sorted(tmp_path.glob("model-*"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"names {shard.name}, which the folder does not have"):
        load(tmp_path)


def test_what_a_family_lacks_is_refused():
    with pytest.raises(ConfigError, match="pooler=True: family=distilbert has none"):
        BertConfig(family="distilbert", pooler=True)
    with pytest.raises(ConfigError, match="family=robert: expected one of"):
        BertConfig(family="robert")
