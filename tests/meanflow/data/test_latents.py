import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from fullstride.errors import ConfigError
from fullstride.meanflow.config.overrides import validate
from fullstride.meanflow.config.schema import DataConfig, TrainConfig
from fullstride.meanflow.data.catalogue import check_holdout, load_data
from fullstride.meanflow.data.latents import SCALE, DrawLatents, latents
from fullstride.meanflow.data.loader import Loader
from fullstride.meanflow.data.order import epoch_order, mirror_half
from fullstride.meanflow.data.shards import write_latents, write_shard
from fullstride.meanflow.training.trainer import Trainer
from tests.meanflow.training.test_trainer import config


def made(count: int, classes: int = 5, shape=(6, 2, 3)) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(count) % classes
    return torch.randn(count, *shape), labels[torch.randperm(count)]


def test_latents_are_drawn_from_their_law(seed):
    """Mean and variance of each entry against the closed form, within five standard errors."""
    generator = torch.Generator().manual_seed(seed)
    mean, log_variance = torch.randn(2, 3, 2, 3, dtype=torch.float64, generator=generator)
    draws = 20_000
    raw = torch.cat([mean, log_variance]).expand(draws, 6, 2, 3)
    got = DrawLatents(0.3)(raw, generator).double()
    assert got.shape == (draws, 3, 2, 3)
    deviation = 0.3 * (log_variance / 2).exp()
    assert ((got.mean(0) - 0.3 * mean).abs() < 5 * deviation / draws**0.5).all()
    assert ((got.var(0) / deviation**2 - 1).abs() < 5 * (2 / draws) ** 0.5).all()
    # Nothing is shared between entries or records.
    assert torch.corrcoef(got.flatten(1).T).fill_diagonal_(0).abs().max() < 6 / draws**0.5


def test_the_generator_decides(seed):
    raw = torch.randn(2, 4, 8, 3, 3).half()
    a, b, c = (DrawLatents()(raw, torch.Generator().manual_seed(s)) for s in (seed, seed, seed + 1))
    assert a.shape == (2, 4, 4, 3, 3)
    assert a.dtype == torch.float32
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_without_a_generator_latents_are_the_scaled_mean(seed):
    raw = torch.randn(5, 8, 2, 3)
    torch.testing.assert_close(DrawLatents()(raw), SCALE * raw[:, :4])


def test_log_variances_are_clamped(seed):
    raw = torch.zeros(2, 2, 1, 1000)
    raw[0, 1], raw[1, 1] = 40, -80
    got = DrawLatents(1.0)(raw, torch.Generator().manual_seed(seed)).std(dim=(1, 2, 3), correction=0)
    torch.testing.assert_close(got.log(), torch.tensor([10.0, -15.0]), atol=0.15, rtol=0)


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_two_folders_of_shards(tmp_path, seed, held_out):
    torch.manual_seed(seed)
    train, test = made(23), made(9)
    write_latents(tmp_path / "train", *train, shard_size=10)
    write_latents(tmp_path / held_out, *test, shard_size=4)
    data = latents(tmp_path, scale=0.5)
    assert (data.name, data.num_classes, data.image_shape, data.pixels) == ("latents", 5, (3, 2, 3), False)
    for split, (moments, labels) in ((data.train, train), (data.test, test)):
        assert not split.in_memory
        assert split.flipped is None
        assert torch.equal(split.labels, labels)
        assert torch.equal(split.read(torch.arange(len(labels))), moments)
    chosen = torch.tensor([7, 1])
    torch.testing.assert_close(data.images(data.test, chosen), 0.5 * test[0][chosen, :3])


@pytest.mark.parametrize("name", ["latents", "image_folder"])
def test_a_share_to_hold_out_beside_what_is_held_out_is_refused_before_a_run_is_made(tmp_path, name):
    for folder in ("train", "test"):
        write_latents(tmp_path / "data" / folder, *made(9))
    given = DataConfig(name, str(tmp_path / "data"), holdout=0.4)
    with pytest.raises(ConfigError, match=r"data\.holdout=0\.4: expected none with \S*data/test, .*; leave it out"):
        Trainer(config(tmp_path / "runs", data=given))
    assert not (tmp_path / "runs").exists()
    check_holdout(dataclasses.replace(given, holdout=0.1))
    (tmp_path / "data" / "test").rename(tmp_path / "other")
    check_holdout(given)


def test_one_folder_holds_some_of_each_class_out(tmp_path, seed):
    torch.manual_seed(seed)
    moments, labels = made(40)
    write_latents(tmp_path, moments, labels, shard_size=13)
    data = latents(tmp_path, holdout=0.25)
    assert torch.bincount(data.test.labels).tolist() == [2] * 5
    together = torch.cat([s.read(torch.arange(len(s))) for s in (data.train, data.test)])
    order, expected = (x.flatten(1)[:, 0].argsort() for x in (together, moments))
    assert torch.equal(together[order], moments[expected])
    assert torch.equal(torch.cat([data.train.labels, data.test.labels])[order], labels[expected])


@pytest.mark.parametrize("workers", [0, 2])
def test_half_of_the_records_come_mirrored(tmp_path, seed, workers):
    torch.manual_seed(seed)
    (moments, labels), flipped = made(40), torch.randn(40, 6, 2, 3)
    write_latents(tmp_path / "train", moments, labels, flipped, shard_size=9)
    write_latents(tmp_path / "test", *made(3), torch.randn(3, 6, 2, 3))
    data = latents(tmp_path)
    sizes = {"steps": 4, "micro_batches": 2, "batch_size": 5}
    chosen = mirror_half(epoch_order(40, **sizes, seed=seed, epoch=0), 40, seed=seed, epoch=0)
    with Loader(data.train, torch.device("cpu"), workers) as loader:
        for batch, step in zip(loader.batches([chosen]), chosen, strict=True):
            assert torch.equal(batch.raw, torch.cat([moments, flipped])[step])
            assert torch.equal(batch.labels, labels[step % 40])


def test_classes_may_be_given(tmp_path):
    moments, _ = made(12)
    write_latents(tmp_path, moments, torch.zeros(12, dtype=torch.long))
    assert [latents(tmp_path, num_classes=n).num_classes for n in (None, 0, 1, 7)] == [1, 0, 1, 7]
    write_shard(tmp_path / "other.safetensors", moments, torch.full((12,), 6))
    assert latents(tmp_path, num_classes=7).num_classes == 7
    for given in (0, 6, -1):
        with pytest.raises(ConfigError, match=f"other.safetensors: label 6 with data.num_classes={given}; .* least 7"):
            latents(tmp_path, num_classes=given)


def test_labels_of_another_set_are_refused(tmp_path, seed):
    """Without a number of classes, a label beyond the number of records is taken for a mistake."""
    moments, labels = made(12)
    write_shard(tmp_path / "a.safetensors", moments, labels)
    write_shard(tmp_path / "b.safetensors", moments[:4], torch.tensor([0, 3, 16, 2]))
    with pytest.raises(ConfigError, match=r"b.safetensors: label 16 in a set of 16 records; .* data.num_classes=17 if"):
        load_data(DataConfig("latents", path=str(tmp_path)))
    assert load_data(DataConfig("latents", path=str(tmp_path), num_classes=17)).num_classes == 17
    with pytest.raises(ConfigError, match=r"b.safetensors: label 16 with data.num_classes=16"):
        load_data(DataConfig("latents", path=str(tmp_path), num_classes=16))
    with pytest.raises(ConfigError, match=r"data.num_classes=10 data=digits: expected none .* knows its classes"):
        validate(TrainConfig(data=DataConfig("digits", num_classes=10)))


def test_shards_unlike_the_first_are_refused(tmp_path):
    write_latents(tmp_path, *made(12))
    write_shard(tmp_path / "other.safetensors", *made(12, shape=(6, 3, 2)))
    with pytest.raises(
        ConfigError, match=r"other\S+: records of shape \(6, 3, 2\), expected \(6, 2, 3\) as in \S+00000"
    ):
        latents(tmp_path)
    write_shard(tmp_path / "other.safetensors", *made(12), torch.zeros(12, 6, 2, 3))
    with pytest.raises(ConfigError, match=r"other\S+: has moments_flip, \S+ has none"):
        latents(tmp_path)
    (tmp_path / "other.safetensors").rename(tmp_path / "0.safetensors")
    with pytest.raises(ConfigError, match=r"00000\S+: has no moments_flip, \S+ has some"):
        latents(tmp_path)


def test_numbers_of_two_kinds_are_refused(tmp_path):
    """A worker would round a batch to the type of its first record: what comes would depend on their number."""
    moments, labels = made(12)
    write_shard(tmp_path / "a.safetensors", moments.half(), labels)
    write_shard(tmp_path / "b.safetensors", moments, labels)
    with pytest.raises(ConfigError, match=r"b.safetensors: moments is F32, expected F16 as in \S+a.safetensors; write"):
        latents(tmp_path)


@pytest.mark.parametrize("left", ['{"whole": tr', "[true]"])
def test_notes_of_an_encoding_that_were_copied_in_part_are_named(tmp_path, left):
    write_latents(tmp_path / "train", *made(12))
    write_latents(tmp_path / "test", *made(12))
    (tmp_path / "encoded.json").write_text(left)
    with pytest.raises(ConfigError, match=r"encoded.json: incomplete or damaged \(.*\); copy it again"):
        latents(tmp_path)


def test_the_fingerprint_tells_sets_of_the_same_shape_apart(tmp_path):
    moments, labels = made(20)
    contents = [(moments, labels), (moments + 1, labels), (moments, 4 - labels)]
    for i, content in enumerate(contents):
        write_latents(tmp_path / str(i), *content)
    settings = [{}, {"scale": 1.0}, {"holdout": 0.2}]
    found = [latents(tmp_path / str(i)).fingerprint for i in range(3)]
    found += [latents(tmp_path / "0", **s).fingerprint for s in settings[1:]]
    assert len(set(found)) == 5
    assert found[0] == latents(tmp_path / "0").fingerprint


def test_a_folder_without_shards_is_refused(tmp_path):
    (tmp_path / "a.npz").touch()
    with pytest.raises(ConfigError, match=r"no \*.safetensors file \(1 other files\); write some"):
        latents(tmp_path)
    with pytest.raises(ConfigError, match="absent: no such folder"):
        latents(tmp_path / "absent")


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_of_nothing_is_refused(tmp_path, scale):
    with pytest.raises(ConfigError, match="data.scale=.*expected a number above 0"):
        latents(tmp_path, scale=scale)


@pytest.mark.parametrize(
    ("value", "dtype"),
    # The last is none of fp32's, in which latents are drawn.
    [(torch.nan, torch.half), (torch.inf, torch.half), (-torch.inf, torch.half), (-1e300, torch.double)],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_numbers_that_are_not_finite_are_refused_with_their_place(tmp_path, seed, value, dtype, workers):
    torch.manual_seed(seed)
    moments, labels = made(20)
    moments = moments.to(dtype)
    moments[13, 5, 1, 2] = value
    (tmp_path / "train").mkdir()
    save_file({"moments": moments, "labels": labels}, tmp_path / "train" / "a.safetensors")
    write_latents(tmp_path / "test", *made(4))
    data = latents(tmp_path)
    message = r"a.safetensors: record 13 of moments: holds numbers that are not finite; create the record again"
    with pytest.raises(ConfigError, match=message):
        data.images(data.train, torch.tensor([2, 13, 4]))
    with Loader(data.train, torch.device("cpu"), workers) as loader, pytest.raises(ConfigError, match=message):
        list(loader.batches([torch.arange(20).reshape(2, 2, 5)]))


def test_a_path_may_begin_in_the_users_home(tmp_path, monkeypatch):
    """Shells expand ~ only in what looks like an assignment, which a key with a dot does not."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_latents(tmp_path / "kept", torch.randn(20, 8, 2, 2), torch.zeros(20, dtype=torch.long))
    assert len(load_data(DataConfig("latents", "~/kept")).train) == 18
