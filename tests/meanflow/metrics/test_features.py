import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fullstride.errors import ConfigError
from fullstride.meanflow.metrics import features as module
from fullstride.meanflow.metrics import inception
from fullstride.meanflow.metrics.classifier import FeatureClassifier
from fullstride.meanflow.metrics.features import FEATURES, Features, build_features, byte_levels
from fullstride.runs.atomic_files import file_sha256
from tests.meanflow.metrics.test_efficientnet import random_network
from tests.meanflow.metrics.test_inception import FakeExtractor

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lite_weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "lite.pth"
    torch.save(random_network(0).state_dict(), path)
    return path


@pytest.fixture
def inception_weights(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch_fidelity", SimpleNamespace(FeatureExtractorInceptionV3=FakeExtractor))
    torch.save({"mix": torch.randn(3, 2048)}, tmp_path / "inception.pth")
    return tmp_path / "inception.pth"


def pictures(seed: int, channels: int = 1) -> torch.Tensor:
    return torch.randn(5, channels, 9, 8, generator=torch.Generator().manual_seed(seed))


def test_every_extractor_gives_what_it_promises(lite_weights, inception_weights):
    model = FeatureClassifier(1, 4).eval()
    weights = {"efficientnet_lite0": lite_weights, "inception": inception_weights}
    for name in FEATURES:
        extractor = build_features(name, CPU, classifier=model, weights=weights.get(name))
        assert extractor.name == name
        values = extractor(pictures(0).double())
        assert values.shape == (5, extractor.dim)
        assert values.dtype == torch.float32
        assert (values[0] - values[1]).abs().max() > 1e-3
        assert not values.requires_grad


def test_classifier_features_are_the_networks_of_clamped_images(seed):
    model = FeatureClassifier(1, 4).eval()
    extractor = build_features("classifier", CPU, classifier=model)
    torch.testing.assert_close(extractor(pictures(seed)), model.features(pictures(seed).clamp(-1, 1)))
    assert extractor.label == "FD-classifier"


def test_efficientnet_features_are_of_bytes_and_grey_is_repeated(lite_weights, seed):
    extractor = build_features("efficientnet_lite0", CPU, weights=lite_weights)
    network = random_network(0)
    grey = pictures(seed)
    levels = F.interpolate(byte_levels(grey), (224, 224), mode="bicubic", antialias=True).clamp(0, 255)
    torch.testing.assert_close(extractor(grey), network.features(levels))
    torch.testing.assert_close(extractor(grey.expand(-1, 3, -1, -1)), network.features(levels))
    assert extractor.label == "FD-EffNetLite0"


def test_batches_change_nothing_but_memory(seed):
    sizes = []

    def compute(images):
        sizes.append(len(images))
        return images.flatten(1)

    extractor = Features("f", "FD-f", 72, "f 1", compute, 2, CPU)
    torch.testing.assert_close(extractor(pictures(seed)), pictures(seed).flatten(1))
    assert sizes == [2, 2, 1]


def test_only_the_official_weights_make_an_fid(monkeypatch, inception_weights):
    found = file_sha256(inception_weights)
    assert build_features("inception", CPU, weights=inception_weights).label == f"FD-Inception-{found[:8]}"
    monkeypatch.setattr(inception, "OFFICIAL_SHA256", found)
    assert build_features("inception", CPU, weights=inception_weights).label == "FID"


def test_the_identity_follows_the_weights(lite_weights, tmp_path):
    same, other = FeatureClassifier(1, 4), FeatureClassifier(1, 4)
    names = [build_features("classifier", CPU, classifier=m).identity for m in (same, same, other)]
    assert names[0] == names[1] != names[2]
    torch.save(random_network(1).state_dict(), tmp_path / "other.pth")
    ours, others = (
        build_features("efficientnet_lite0", CPU, weights=w).identity for w in (lite_weights, tmp_path / "other.pth")
    )
    assert file_sha256(lite_weights) in ours
    assert ours != others


def test_features_are_plain_fp32_whatever_the_process_computes_in(monkeypatch):
    seen = []

    def compute(images):
        tf32 = torch.backends.cudnn.allow_tf32
        seen.append((torch.get_float32_matmul_precision(), tf32, torch.is_autocast_enabled("cpu")))
        return images.flatten(1)

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            Features("f", "FD-f", 72, "f 1", compute, 5, CPU)(pictures(0))
        assert seen == [("highest", False, False)]
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_extractors_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="features=inceptoin: expected one of inception, .* did you mean inception"):
        build_features("inceptoin", CPU)
    with pytest.raises(ConfigError, match="features=efficientnet_lite0: no file of weights given"):
        build_features("efficientnet_lite0", CPU)
    with pytest.raises(ValueError, match="needs a trained classifier"):
        build_features("classifier", CPU)
    assert list(module.FEATURES) == ["classifier", "efficientnet_lite0", "inception"]
