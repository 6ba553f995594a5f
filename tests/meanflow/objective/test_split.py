"""`split="auto"`: the shared pass where the network allows it, the static one where not, and no trace of the trial."""

import pytest
import torch
from torch import Tensor, nn

from fullstride.meanflow.models.unet import UNet
from fullstride.meanflow.objective.loss import MeanFlowLoss
from tests.meanflow.fields import batch_of_points

D = 6


class Around(nn.Module):
    """A linear layer, one operation, another layer."""

    def __init__(self, operation):
        super().__init__()
        self.first = nn.Linear(D + 2, 8)
        self.last = nn.Linear(8, D)
        self.operation = operation
        self.calls = 0

    def forward(self, z: Tensor, r: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        self.calls += 1
        return self.last(self.operation(self.first(torch.cat([z, t[:, None], r[:, None]], 1))))


SHARED = {
    "tanh": torch.tanh,
    "relu": nn.ReLU(inplace=True),
    "softmax": nn.Softmax(-1),
    "layer mean": lambda x: x - x.mean(-1, keepdim=True),
    "einsum": lambda x: torch.einsum("bi,ij->bj", x, torch.ones(8, 8, dtype=x.dtype).triu()),
    "reshape": lambda x: x.reshape(x.shape[0], 2, 4).softmax(1).view(-1, 8),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "in place": lambda x: x.sin().mul_(2).add_(x),
    "stack": lambda x: torch.stack([x, x * x], -1).sum(-1),
    "clamp": lambda x: x.clamp(-0.3, 0.4),
}
STATIC = {
    "fft": (lambda x: torch.fft.rfft(x).real.repeat(1, 2)[:, :8], ""),
    "batch norm": (nn.BatchNorm1d(8, dtype=torch.float64), "batch_norm"),
    "all samples": (lambda x: x - x.mean(0), "mean along"),
    "sorted": (lambda x: x.sort(-1).values, "sort"),
}


def points(seed: int):
    x, e, t, r = batch_of_points(seed, batch=7, shape=(D,))
    return x, e, t, r


def gradients(loss, net, given):
    value, _ = loss.at(net, *given)
    return [value, *torch.autograd.grad(value, list(net.parameters()))]


@pytest.mark.parametrize("name", SHARED)
def test_it_is_shared_where_the_network_allows_it_and_the_loss_is_the_same(name, capfd, seed):
    torch.manual_seed(seed)
    net, given = Around(SHARED[name]).double(), points(seed)
    expected = gradients(MeanFlowLoss(ratio=0.5, split="static"), net, given)
    before = net.calls
    found = gradients(MeanFlowLoss(ratio=0.5), net, given)
    assert net.calls == before + 1  # one pass, and the trial was the copy's
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert capfd.readouterr().err.count("split=auto of Around: shared") == 1
    gradients(MeanFlowLoss(ratio=0.5), net, given)
    assert "split=auto" not in capfd.readouterr().err


@pytest.mark.parametrize("name", STATIC)
def test_it_is_static_where_not_and_says_why(name, capfd):
    operation, why = STATIC[name]
    net, given = Around(operation).double(), points(1)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    loss = MeanFlowLoss(ratio=0.5)
    before = torch.get_rng_state()
    loss.at(net, *given)
    assert net.calls == 2
    assert torch.equal(torch.get_rng_state(), before)
    said = capfd.readouterr().err
    assert "split=auto of Around: static, because" in said
    assert why in said
    if name == "batch norm":  # two passes of the network itself, none of the trial
        assert net.state_dict()["operation.num_batches_tracked"] == state["operation.num_batches_tracked"] + 2


def test_hooks_and_functions_are_not_tried(capfd):
    net, given, called = Around(torch.tanh).double(), points(2), []
    net.first.register_forward_hook(lambda *_: called.append(1))
    MeanFlowLoss(ratio=0.5).at(net, *given)
    assert len(called) == 2
    assert "it has hooks" in capfd.readouterr().err
    plain = Around(torch.tanh).double()
    MeanFlowLoss(ratio=0.5).at(lambda *x, **y: plain(*x, **y), *given)
    assert plain.calls == 2


def test_random_numbers_of_the_trial_are_not_the_runs():
    net, given = Around(nn.Dropout(0.5)).double(), points(3)
    values = []
    for _ in range(2):  # the first with a trial
        torch.manual_seed(4)
        values.append(MeanFlowLoss(ratio=0.5).at(net, *given)[0])
    assert torch.equal(*values)


def test_other_ways_to_take_the_derivative_are_static(capfd):
    net, given = Around(torch.tanh).double(), points(5)
    expected = MeanFlowLoss(ratio=0.5, split="static").at(net, *given)[0]
    for loss in (MeanFlowLoss(ratio=0.5, chunk=2), MeanFlowLoss(ratio=0.5, backend="forward_ad")):
        torch.testing.assert_close(loss.at(net, *given)[0], expected)
    assert "split=auto" not in capfd.readouterr().err


def test_the_librarys_networks_share(capfd):
    net = UNet(1, 8, channels=8, channel_mult=(1,), num_blocks=1, attention_resolutions=())
    MeanFlowLoss(ratio=0.5)(net, torch.randn(4, 1, 8, 8))[0].backward()
    assert "split=auto of UNet: shared" in capfd.readouterr().err


def test_a_compiled_step_refuses_a_shared_pass_that_loses_what_a_view_is_given(forked):
    (done,) = forked(["tests.meanflow.objective.compiled_view"])
    assert done.returncode == 0, done.stderr[-2000:]
