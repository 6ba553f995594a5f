import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fullstride.errors import ConfigError
from fullstride.meanflow.metrics.inception import load_inception


class FakeExtractor(nn.Module):
    """torch-fidelity's interface: features by name, weights by path, bytes in, a tuple out."""

    def __init__(self, name, features_list, feature_extractor_weights_path):
        super().__init__()
        assert features_list == ["2048"]
        self.register_buffer("mix", torch.randn(3, 2048))
        self.load_state_dict(torch.load(feature_extractor_weights_path))

    def forward(self, x):
        assert x.dtype == torch.uint8
        return (x.float().mean((2, 3)) @ self.mix,)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_fidelity", SimpleNamespace(FeatureExtractorInceptionV3=FakeExtractor))


def test_the_named_layer_is_asked_for_bytes(fake, tmp_path, seed):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(3, 2048, generator=g)
    torch.save({"mix": mix}, tmp_path / "w.pth")
    levels = torch.randint(256, (2, 3, 5, 7), generator=g).float()
    features = load_inception(tmp_path / "w.pth").features(levels)
    torch.testing.assert_close(features, levels.mean((2, 3)) @ mix)


def test_loading_draws_no_random_number_of_the_process(fake, tmp_path):
    torch.save({"mix": torch.ones(3, 2048)}, tmp_path / "w.pth")
    before = torch.get_rng_state()
    load_inception(tmp_path / "w.pth")
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_that_do_not_fit_are_refused(fake, tmp_path):
    with pytest.raises(ConfigError, match=r"none.pth: no such file; .*6726825d.pth; download https://github.com"):
        load_inception(tmp_path / "none.pth")
    torch.save({"mix": torch.zeros(2, 2)}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match=r"w.pth: not the network's tensors \(Error\(s\) in loading .*6726825d.pth"):
        load_inception(tmp_path / "w.pth")


@pytest.mark.parametrize("error", [ImportError("No module named torchvision"), RuntimeError("operator nms\nmore")])
def test_without_torch_fidelity_the_message_says_what_to_install(monkeypatch, tmp_path, error):
    def fail(name):
        raise error

    torch.save({}, tmp_path / "w.pth")
    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(ConfigError, match=r"import failed \((No|operator)[^\n]*; pip install torch-fidelity, with a"):
        load_inception(tmp_path / "w.pth")


def test_torch_fidelitys_own_network_is_loaded(tmp_path):
    real = pytest.importorskip("torch_fidelity").FeatureExtractorInceptionV3

    class Untrained(real):
        def load_state_dict(self, state_dict):
            assert state_dict == {}

    torch.save({}, tmp_path / "none.pth")
    untrained = Untrained("untrained", ["2048"], feature_extractor_weights_path=str(tmp_path / "none.pth"))
    torch.save(untrained.state_dict(), tmp_path / "w.pth")
    levels = torch.randint(256, (2, 3, 32, 32)).float()
    features = load_inception(tmp_path / "w.pth").features(levels)
    assert features.shape == (2, 2048)
    assert (features[0] - features[1]).abs().max() > 0
    torch.testing.assert_close(features, untrained(levels.to(torch.uint8))[0])
