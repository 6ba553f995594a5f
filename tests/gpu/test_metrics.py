"""Metrics of features on a GPU agree with the CPU's: `python -m pytest tests/gpu`."""

import pytest
import torch

from fullstride.device.precision import set_precision
from fullstride.meanflow.metrics.classifier import FeatureClassifier, train_classifier
from fullstride.meanflow.metrics.distances import frechet_distance, kernel_distance, precision_recall
from fullstride.meanflow.metrics.features import build_features
from fullstride.meanflow.metrics.reference import reference
from tests.meanflow.metrics.test_efficientnet import random_network
from tests.meanflow.metrics.test_reference import data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_pairs_and_moments_agree_with_the_cpu(seed):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(3001, 64, generator=g), torch.randn(2500, 64, generator=g) * 0.9 + 0.1
    assert precision_recall(x.cuda(), y.cuda()) == pytest.approx(precision_recall(x, y), abs=1e-9)
    assert kernel_distance(x.cuda(), y.cuda()) == pytest.approx(kernel_distance(x, y), rel=1e-9)
    assert frechet_distance(x.cuda(), y.cuda()) == pytest.approx(frechet_distance(x, y), rel=1e-9)


def test_features_do_not_change_with_the_precision_of_training(tmp_path):
    path = tmp_path / "w.pth"
    torch.save(random_network(0).state_dict(), path)
    images = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    expected = build_features("efficientnet_lite0", CPU, weights=path)(images)
    extractor = build_features("efficientnet_lite0", CUDA, weights=path)
    found = []
    try:
        for precision in ("fp32", "tf32"):
            set_precision(precision, CUDA)
            found.append(extractor(images).cpu())
    finally:
        set_precision("fp32", CUDA)
    assert torch.equal(*found)
    # Convolutions of 17 blocks on another device, by other algorithms; in TF32 this would be above 1e-3.
    assert (found[0] - expected).norm() < 2e-4 * expected.norm()


def test_reference_and_score_agree_with_the_cpu(tmp_path):
    model = FeatureClassifier(1, 2).eval()
    toy = data()
    images = torch.rand(31, 1, 8, 8) * 2 - 1
    scores = []
    for device in (CPU, CUDA):
        extractor = build_features("classifier", device, classifier=model)
        found, floor = reference(toy, extractor, num_floor=40, folder=tmp_path / device.type)
        assert found.features.device == CPU
        scores.append((floor, found.score(extractor(images))))
    for on_cpu, on_cuda in zip(*scores, strict=True):
        assert on_cuda.frechet == pytest.approx(on_cpu.frechet, rel=1e-3)
        assert on_cuda.kernel == pytest.approx(on_cpu.kernel, rel=1e-3)
        assert on_cuda.num_samples == on_cpu.num_samples


def test_a_classifier_comes_out_the_same_whatever_the_process_trains_in(seed):
    g = torch.Generator().manual_seed(seed)
    images, labels = torch.randn(640, 1, 32, 32, generator=g), torch.randint(10, (640,), generator=g)
    found = []
    try:
        for precision, searches in (("fp32", False), ("bf16", True), ("tf32", True)):
            set_precision(precision, CUDA)
            torch.backends.cudnn.benchmark = searches
            model = train_classifier(images, labels, num_classes=10, epochs=3, device=CUDA)
            found.append([*model.parameters()])
            assert torch.backends.cudnn.benchmark == searches
    finally:
        set_precision("fp32", CUDA)
        torch.backends.cudnn.benchmark = False
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
