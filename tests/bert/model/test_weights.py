import dataclasses
import json
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig as TheirConfig
from transformers import BertForMaskedLM, BertModel

from fullstride.assets.fetch import fetch
from fullstride.bert.data.batch import Batch
from fullstride.bert.model.families import FAMILIES
from fullstride.bert.model.weights import load, named, save_model
from fullstride.bert.training.loss import mlm_loss
from fullstride.errors import ConfigError
from tests.bert.models import ODD, awake, ids, run, scores

THEIRS: dict[str, Any] = {theirs: getattr(ODD, ours) for theirs, ours in FAMILIES["bert"].fields.items()}
LENGTHS = np.array([29, 13, 1])
REAL = np.arange(29) < LENGTHS[:, None]


def their_model(kind, seed: int):
    torch.manual_seed(seed)
    model = kind(TheirConfig(**THEIRS)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    return model


@pytest.fixture
def folder(tmp_path):
    their_model(BertForMaskedLM, 0).save_pretrained(tmp_path)
    return tmp_path


def test_hidden_states_and_scores_are_those_of_transformers(tmp_path, seed):
    theirs = their_model(BertForMaskedLM, seed)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    tokens, types = ids(seed, (3, 29)), ids(seed + 9, (3, 29), ODD.types)
    given = {"token_type_ids": np.asarray(types), "attention_mask": REAL.astype(int)}
    with torch.no_grad():
        out = theirs(
            torch.tensor(np.asarray(tokens)),
            **{name: torch.tensor(x) for name, x in given.items()},
            output_hidden_states=True,
        )
    hidden = run(ours, tokens, types=types, lengths=jnp.asarray(LENGTHS, jnp.int32))
    expected = out.hidden_states[-1].numpy()
    assert np.abs(np.asarray(hidden) - expected)[REAL].max() < 2e-5 * np.abs(expected).max()
    logits = out.logits.numpy()
    assert np.abs(np.asarray(scores(ours, hidden)) - logits)[REAL].max() < 2e-5 * np.abs(logits).max()


def test_the_loss_and_every_gradient_are_those_of_transformers_in_fp64(folder):
    theirs = BertForMaskedLM.from_pretrained(folder, attn_implementation="eager").double().eval()
    rng, rows = np.random.default_rng(3), np.arange(3)[:, None]
    # Transformers give what [PAD] looks up, number 0, no gradient; here padding alone has it, which has none.
    tokens, masked = rng.integers(1, 97, (3, 29)), np.sort(rng.permuted(np.tile(np.arange(13), (3, 1)), axis=1)[:, :4])
    masked[2] = 0  # the last row has one token
    counted = np.asarray([[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0]], bool)
    labels, given = rng.integers(0, 97, (3, 4)), np.full((3, 29), -100)
    given[np.broadcast_to(rows, masked.shape)[counted], masked[counted]] = labels[counted]
    mask = torch.tensor(REAL.astype(int))
    found = theirs(torch.tensor(tokens), attention_mask=mask, labels=torch.tensor(given)).loss
    found.backward()
    with jax.enable_x64(True):
        model = jax.tree.map(lambda x: x if isinstance(x, bool) else x.astype("float64"), load(folder))
        batch = Batch(*map(jnp.asarray, (tokens, masked, labels, counted)), lengths=jnp.asarray(LENGTHS))
        value_and_grad = eqx.filter_jit(eqx.filter_value_and_grad(lambda m: mlm_loss(m, batch)[0].value))
        loss, gradient = value_and_grad(model)
        ours = {name: np.asarray(x) for name, x in named(eqx.combine(gradient, model))}
    assert float(loss) == pytest.approx(found.item(), rel=1e-12)
    expected = {name: x.grad.numpy() for name, x in theirs.named_parameters() if x.grad is not None}
    assert expected.keys() == ours.keys()
    for name, theirs_of_it in expected.items():
        # A key's bias has no gradient but for rounding.
        np.testing.assert_allclose(ours[name], theirs_of_it, rtol=1e-9, atol=1e-12, err_msg=name)


def test_an_encoder_alone_with_its_pooler_is_that_of_transformers(tmp_path, seed):
    theirs = their_model(BertModel, seed)
    theirs.save_pretrained(tmp_path)
    assert not any(name.startswith("bert.") for name in load_file(tmp_path / "model.safetensors"))
    ours = load(tmp_path)
    tokens = ids(seed, (2, 11))
    with torch.no_grad():
        out = theirs(torch.tensor(np.asarray(tokens)))
    hidden = run(ours, tokens)
    np.testing.assert_allclose(hidden, out.last_hidden_state.numpy(), atol=3e-5)
    np.testing.assert_allclose(ours.pooled(hidden), out.pooler_output.numpy(), atol=3e-5)
    assert ours.head is None
    with pytest.raises(ConfigError, match="no head"):
        ours.logits(hidden)


@pytest.mark.parametrize(("head", "kind"), [(True, BertForMaskedLM), (False, BertModel)])
def test_transformers_reads_what_is_saved(tmp_path, seed, head, kind):
    ours = awake(dataclasses.replace(ODD, head=head, pooler=not head), seed)
    save_model(ours, tmp_path, pad_token_id=0)
    theirs, report = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    theirs.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    tokens = ids(seed, (2, 7))
    np.testing.assert_array_equal(run(again, tokens), run(ours, tokens))
    if head:
        np.testing.assert_array_equal(*(scores(model, run(model, tokens)) for model in (again, ours)))


def changed(folder, change) -> None:
    """Rewrite the weights; the file has no tied decoder, as transformers leaves it out."""
    arrays = dict(load_file(folder / "model.safetensors"))
    change(arrays)
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})


def test_files_of_long_ago_have_other_names(folder, capsys):
    ours = load(folder)

    def age(arrays):
        for name in [name for name in arrays if "LayerNorm" in name]:
            old = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
            arrays[old] = arrays.pop(name)
        arrays["bert.embeddings.position_ids"] = torch.arange(ODD.max_length)[None]
        arrays["cls.seq_relationship.weight"] = torch.zeros(2, ODD.hidden_size)
        arrays["cls.predictions.decoder.weight"] = arrays["bert.embeddings.word_embeddings.weight"].clone()

    changed(folder, age)
    old, tokens = load(folder), ids(0, (2, 7))
    np.testing.assert_array_equal(run(old, tokens), run(ours, tokens))
    assert "not used, since next-sentence prediction is not supported: cls.seq_relation" in capsys.readouterr().err


def test_what_a_file_lacks_adds_or_misshapes_is_listed(folder):
    def spoil(arrays):
        del arrays["bert.encoder.layer.1.output.dense.bias"]
        arrays["bert.encoder.layer.3.output.dense.bias"] = torch.zeros(3)
        arrays["cls.predictions.bias"] = torch.zeros(5)

    changed(folder, spoil)
    listed = (
        "missing: bert.encoder.layer.1.output.dense.bias; unexpected: bert.encoder.layer.3.output.dense.bias; "
        "of another shape: cls.predictions.bias is [5] for [97]"
    )
    with pytest.raises(ConfigError, match=re.escape(listed)):
        load(folder)


def test_a_decoder_of_its_own_is_refused(folder):
    changed(folder, lambda arrays: arrays.update({"cls.predictions.decoder.weight": torch.zeros(97, 36)}))
    with pytest.raises(ConfigError, match="decoder.weight differs from bert.embeddings.word_embeddings.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "relu"}, "hidden_act=relu"),
        ({"model_type": "electra"}, "model_type=electra; expected one of bert"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type=relative_key"),
        ({"num_attention_heads": 7}, "hidden_size=36: expected a multiple of heads=7"),
        ({"hidden_dropout_prob": "much"}, "config.json"),
        ({"vocab_size": 0}, "vocab_size=0"),
    ],
)
def test_another_architecture_is_refused_by_its_setting(folder, change, named):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=re.escape(named)):
        load(folder)


def test_missing_and_damaged_files_are_named(folder, tmp_path_factory):
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path_factory.mktemp("empty"))
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: cannot be read"):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="model.safetensors: not a readable safetensors file"):
        load(folder)


def test_minilm_agrees_with_transformers(tmp_path):
    for name in ("weights", "vocab"):
        try:
            file = fetch(f"minilm/{name}")
        except ConfigError as error:
            pytest.skip(str(error))
        (tmp_path / file.name).symlink_to(file)
    sizes: dict[str, Any] = {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    }
    config = TheirConfig(**sizes)
    config.save_pretrained(tmp_path)
    ours, theirs = load(tmp_path), BertModel.from_pretrained(tmp_path).eval()
    assert ours.config.pooler
    assert ours.head is None
    tokens = ids(0, (3, 29), config.vocab_size)
    with torch.no_grad():
        out = theirs(torch.tensor(np.asarray(tokens)), attention_mask=torch.tensor(REAL.astype(int)))
    error = np.abs(
        np.asarray(run(ours, tokens, lengths=jnp.asarray(LENGTHS, jnp.int32))) - out.last_hidden_state.numpy()
    )
    assert error[REAL].max() < 5e-6
