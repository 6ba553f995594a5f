import dataclasses

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.data.dataset import Dataset, Split
from fullstride.meanflow.metrics import reference as module
from fullstride.meanflow.metrics.classifier import accuracy
from fullstride.meanflow.metrics.distances import frechet_distance, kernel_distance, precision_recall
from fullstride.meanflow.metrics.features import Features
from fullstride.meanflow.metrics.reference import reference, reference_classifier

CPU = torch.device("cpu")


def data(train: int = 40, test: int = 31, fingerprint: str = "f1") -> Dataset:
    """Bright and dark pictures, sorted by class, as bytes."""
    g = torch.Generator().manual_seed(0)

    def split(n: int) -> Split:
        labels = torch.arange(n) * 2 // n
        noise = torch.randint(0, 100, (n, 1, 8, 8), generator=g)
        return Split((noise + labels[:, None, None, None] * 150).to(torch.uint8), labels)

    return Dataset("toy", split(train), split(test), 2, (1, 8, 8), fingerprint)


class Pooled(Features):
    """An extractor of 16 features that counts its images."""

    def __init__(self, identity: str = "pooled 1"):
        self.__dict__["counts"] = []
        super().__init__("pooled", "FD-pooled", 16, identity, self._pool, 512, CPU)

    @property
    def images(self) -> int:
        return sum(self.__dict__["counts"])

    def _pool(self, images):
        self.__dict__["counts"].append(len(images))
        return torch.nn.functional.avg_pool2d(images, 2).flatten(1)


def test_the_reference_is_the_held_out_split_and_the_floor_the_training_split(tmp_path):
    toy, extractor = data(), Pooled()
    found, floor = reference(toy, extractor, num_floor=40, folder=tmp_path)
    test, train = (extractor(toy.images(s, torch.arange(len(s)))) for s in (toy.test, toy.train))
    torch.testing.assert_close(found.features, test)
    assert (floor.label, floor.num_samples, floor.num_reference) == ("FD-pooled", 40, 31)
    assert floor.frechet == pytest.approx(frechet_distance(train, test), rel=1e-6)
    assert floor.kernel == pytest.approx(kernel_distance(train, test), rel=1e-6)
    assert (floor.precision, floor.recall) == pytest.approx(precision_recall(train, test))
    assert floor.frechet > 0


def test_scores_tell_real_pictures_from_noise(tmp_path):
    toy, extractor = data(), Pooled()
    found, floor = reference(toy, extractor, num_floor=31, folder=tmp_path)
    noise = torch.rand(31, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    score, same = found.score(extractor(noise)), found.score(found.features)
    assert (same.frechet, same.precision, same.recall) == pytest.approx((0, 1, 1), abs=1e-9)
    assert score.frechet > 3 * floor.frechet
    assert score.kernel > 3 * abs(floor.kernel)
    assert score.precision < floor.precision
    assert score.num_samples == 31


def test_the_second_time_comes_from_the_cache(tmp_path):
    first, extractor = Pooled(), Pooled()
    computed, floor = reference(data(), first, num_floor=20, folder=tmp_path)
    assert first.images == 31 + 20
    cached, cached_floor = reference(data(), extractor, num_floor=20, folder=tmp_path)
    assert extractor.images == 0
    assert cached_floor == floor
    assert torch.equal(cached.features, computed.features)
    noise = torch.randn(9, 16)
    assert cached.score(noise) == computed.score(noise)


@pytest.mark.parametrize(
    ("settings", "fingerprint", "identity"),
    [({"num_floor": 21}, "f1", "pooled 1"), ({"num": 30}, "f1", "pooled 1"), ({}, "f2", "pooled 1"), ({}, "f1", "p 2")],
)
def test_anything_else_is_computed_anew(tmp_path, settings, fingerprint, identity):
    reference(data(), Pooled(), num_floor=20, folder=tmp_path)
    extractor = Pooled(identity)
    found, floor = reference(data(fingerprint=fingerprint), extractor, folder=tmp_path, **{"num_floor": 20} | settings)
    assert extractor.images == len(found.features) + floor.num_samples


def test_another_version_is_computed_anew(tmp_path, monkeypatch):
    reference(data(), Pooled(), num_floor=20, folder=tmp_path)
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    extractor = Pooled()
    reference(data(), extractor, num_floor=20, folder=tmp_path)
    assert extractor.images > 0


def test_a_damaged_file_is_computed_anew_and_said(tmp_path, capsys):
    _, floor = reference(data(), Pooled(), num_floor=20, folder=tmp_path)
    next(tmp_path.glob("*.safetensors")).write_bytes(b"no")
    extractor = Pooled()
    assert reference(data(), extractor, num_floor=20, folder=tmp_path)[1] == floor
    assert extractor.images > 0
    assert "damaged" in capsys.readouterr().err


def test_a_part_of_a_sorted_split_holds_every_class(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 7)
    toy = data(test=400)
    found, _ = reference(toy, Pooled(), num_floor=20, num=100, folder=tmp_path)
    bright = (found.features.mean(1) > 0).double().mean()
    assert len(found.features) == 100
    assert 0.35 < bright < 0.65
    assert len(found.features.unique(dim=0)) == 100


def test_counts_above_what_there_is_take_all_and_say_so(tmp_path):
    _, floor = reference(data(), Pooled(), num_floor=1000, num=1000, folder=tmp_path)
    assert (floor.num_samples, floor.num_reference) == (40, 31)


def test_the_folder_is_the_users_cache_unless_given(tmp_path, monkeypatch):
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(tmp_path))
    reference(data(), Pooled(), num_floor=20)
    assert list((tmp_path / "reference").glob("*.json"))


def test_too_few_images_and_latents_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="data=toy: 31 held-out and 3 training images .* at least 4 of each"):
        reference(data(), Pooled(), num_floor=3, folder=tmp_path)
    latents = dataclasses.replace(data(), pixels=False)
    with pytest.raises(ConfigError, match="data=toy holds latents, but features=pooled needs pictures"):
        reference(latents, Pooled(), num_floor=20, folder=tmp_path)


def test_the_classifier_is_trained_once(tmp_path, monkeypatch):
    toy = data()
    state = torch.get_rng_state()
    model = reference_classifier(toy, CPU, epochs=5, folder=tmp_path)
    images = toy.images(toy.test, torch.arange(len(toy.test)))
    assert accuracy(model, images, toy.test.labels) > 0.9
    monkeypatch.setattr(module, "train_classifier", None)
    again = reference_classifier(toy, CPU, epochs=5, folder=tmp_path)
    assert torch.equal(again.features(images), model.features(images))
    assert not any(p.requires_grad for p in again.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(TypeError):
        reference_classifier(toy, CPU, epochs=6, folder=tmp_path)


def test_a_classifier_sees_no_more_pictures_than_fit(tmp_path, monkeypatch, capsys):
    """All pictures of a large folder would be hundreds of GiB; another number of them is another classifier."""
    toy, seen = data(), []
    train = module.train_classifier
    monkeypatch.setattr(module, "TRAINED", 20 * 64 + 63)
    monkeypatch.setattr(
        module, "train_classifier", lambda x, y, **given: seen.append((len(x), set(y.tolist()))) or train(x, y, **given)
    )
    part = reference_classifier(toy, CPU, epochs=5, folder=tmp_path)
    assert "trained on 20 of 40 pictures of data=toy" in capsys.readouterr().err
    reference_classifier(toy, CPU, epochs=5, folder=tmp_path)
    monkeypatch.setattr(module, "TRAINED", 40 * 64)
    whole = reference_classifier(toy, CPU, epochs=5, folder=tmp_path)
    assert seen == [(20, {0, 1}), (40, {0, 1})]
    assert not torch.equal(part.head.weight, whole.head.weight)
    assert "pictures" not in capsys.readouterr().err


def test_a_classifier_needs_labels(tmp_path):
    unlabelled = dataclasses.replace(data(), num_classes=0)
    with pytest.raises(ConfigError, match="data=toy has no labels"):
        reference_classifier(unlabelled, CPU, folder=tmp_path)


def test_the_projects_own_extractor_fits(tmp_path):
    extractor = Features("f", "FD-f", 64, "f 1", lambda images: images.flatten(1), 8, CPU)
    found, floor = reference(data(), extractor, num_floor=31, folder=tmp_path)
    assert found.features.shape == (31, 64)
    assert floor.label == "FD-f"
