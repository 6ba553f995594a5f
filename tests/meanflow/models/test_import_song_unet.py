import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.models.import_song_unet import from_py_meanflow
from fullstride.meanflow.models.song_unet import SongUNet
from fullstride.meanflow.objective.derivative import velocity_and_derivative
from tests.meanflow.models.py_meanflow_checkpoint import checkpoint, formula

# Every 31st number of u and of du/dt of py-meanflow's own network with these weights, at these points, its
# frequencies and softmax carried to fp64 like the rest (commit 1f6d72d, PyTorch 2.13).
PUBLISHED = {
    "net": (
        [0.1147290821, 0.2460865400, 0.2243075166, -0.0979993965, 0.4241814501, 0.3877518931, 0.1732411910],
        [-0.0610340699, -0.2407018098, 0.0351563964, 0.0124716014, 0.1448244112, -0.0387267088, 0.0083294675],
    ),
    "net_ema1": (
        [0.0317858131, 0.0866914465, -0.7267589342, 0.0318164455, -0.3811774728, 0.4143744362, -0.8409481161],
        [0.1103898466, 0.0390771753, 0.0009314319, 0.1203422308, -0.1329911804, -0.0263139102, 0.0748509934],
    ),
}


def same_size() -> SongUNet:
    sizes = {"channels": 8, "channel_mult": (1, 2), "num_blocks": 1, "attention_resolutions": (3,), "augment_dim": 3}
    return SongUNet(2, 6, **sizes).double().eval()


@pytest.mark.parametrize("network", PUBLISHED)
def test_imported_weights_give_the_values_and_derivatives_they_give_there(network):
    net = same_size()
    net.load_state_dict(from_py_meanflow(checkpoint(), network))
    z, v, augment = formula("z", (3, 2, 6, 6)) * 5, formula("v", (3, 2, 6, 6)) * 5, formula("augment", (3, 3))
    t, r = torch.tensor([[0.9, 0.5, 0.7], [0.0, 0.5, 0.2]], dtype=torch.float64)
    with torch.no_grad():
        got = velocity_and_derivative(net, z, r, t, v, {"augment": augment})
    for a, b in zip(got, PUBLISHED[network], strict=True):
        torch.testing.assert_close(a.flatten()[::31], torch.tensor(b, dtype=torch.float64), rtol=0, atol=1e-9)


def test_a_network_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="the checkpoint has net, net_ema1, num_updates, expected net_ema2"):
        from_py_meanflow(checkpoint(), "net_ema2")


@pytest.mark.parametrize("name", ["net.weight", "net.enc.0.weight", "net.dec.6x6_block0.norm9.bias"])
def test_another_kind_of_network_is_refused(name):
    with pytest.raises(ConfigError, match="expected the names of py-meanflow's SongUNet"):
        from_py_meanflow({name: torch.zeros(1)}, "net")


def test_nothing_is_left_out_or_made_up():
    state = {name: value for name, value in checkpoint().items() if name.startswith("net.")}
    kept = [value for name, value in state.items() if not name.endswith("resample_filter")]
    own = from_py_meanflow(state, "net")
    assert [id(value) for value in own.values()] == [id(value) for value in kept]
    assert own.keys() == same_size().state_dict().keys()
