import pytest
import torch

from fullstride.meanflow.config.schema import DataConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.data.digits import digits
from fullstride.meanflow.metrics.classifier import FeatureClassifier, accuracy, train_classifier
from fullstride.meanflow.metrics.reference import reference_classifier


@pytest.fixture(scope="module")
def trained() -> FeatureClassifier:
    """The digits' own, which other tests of this run take from the cache, too."""
    return reference_classifier(load_data(DataConfig()), torch.device("cpu"))


def test_reads_the_held_out_digits(trained):
    images, labels = digits("test")
    assert accuracy(trained, images, labels) > 0.95


def test_accuracy_is_the_share_of_right_answers(trained):
    images, _ = digits("test")
    labels = trained.predict(images[:10])
    labels[:3] = (labels[:3] + 1) % 10
    assert accuracy(trained, images[:10], labels) == pytest.approx(0.7)


def test_features_of_an_image_do_not_depend_on_its_batch(trained):
    images, _ = digits("test")
    together = trained.features(images)
    assert together.shape == (899, 64)
    torch.testing.assert_close(trained.features(images[100:101]), together[100:101], rtol=1e-4, atol=1e-5)
    assert (together.std(0) > 0).sum() > 32


def test_the_seed_decides_and_the_global_generator_stays():
    images, labels = digits("train")
    state = torch.get_rng_state()
    a, b, c = (train_classifier(images[:64], labels[:64], num_classes=10, seed=s, epochs=1) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(a.head.weight, b.head.weight)
    assert not torch.equal(a.head.weight, c.head.weight)


def test_cuda_generators_are_not_reseeded(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    train_classifier(torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.long), num_classes=2, epochs=1)
    assert seeded == []


@pytest.mark.parametrize("shape", [(3, 28, 28), (1, 9, 11)])
def test_other_images_work(shape):
    model = train_classifier(torch.randn(10, *shape), torch.arange(10) % 3, num_classes=3, epochs=1)
    assert model(torch.randn(2, *shape)).shape == (2, 3)


def test_labels_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="2 images and 3 labels"):
        train_classifier(torch.zeros(2, 1, 8, 8), torch.zeros(3, dtype=torch.long), num_classes=2)
    with pytest.raises(ValueError, match="labels run from 0 to 5, expected 0 to 1"):
        train_classifier(torch.zeros(2, 1, 8, 8), torch.tensor([0, 5]), num_classes=2)


def test_images_that_cannot_be_used_are_refused(trained):
    none = torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long)
    with pytest.raises(ValueError, match="images are 8x7, expected at least 8x8"):
        train_classifier(torch.zeros(2, 1, 8, 7), torch.zeros(2, dtype=torch.long), num_classes=2)
    with pytest.raises(ValueError, match="there are no images"):
        train_classifier(*none, num_classes=2)
    with pytest.raises(ValueError, match="there are no images"):
        accuracy(trained, *none)
