"""The gradients of convolutions in a compiled backward pass lie without gaps, each copied once at most."""

import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor, fx, nn

from fullstride.step.torch.runners.backends import compiled_loss
from fullstride.step.torch.runners.dense_gradients import BACKWARD, DenseGradients

WIDTHS = (5, 3, 4)


class Joined(nn.Module):
    """Convolutions of a joined image, two of which share their result's gradient, as in a U-Net on its way up."""

    def __init__(self, dimensions: int):
        super().__init__()
        kind, (a, b, c) = getattr(nn, f"Conv{dimensions}d"), WIDTHS
        self.first = kind(2, a, 3, padding=1)
        self.skip = kind(2, a, 1)
        self.other = kind(2, b, 3, padding=1)
        self.last = kind(a + b, c, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.first(x) + self.skip(x), self.other(x)], 1))


def _loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    y = model(x)
    return y.sin().square().sum(), {"mean": y.mean()}


CASES = [
    (1, torch.contiguous_format),
    (2, torch.contiguous_format),
    (2, torch.channels_last),
    (3, torch.contiguous_format),
    (3, torch.channels_last_3d),
]


@pytest.mark.parametrize(("dimensions", "order"), CASES)
def test_what_a_convolution_gets_lies_without_gaps(seed, dimensions, order):
    model = Joined(dimensions).to(memory_format=order)  # pyright: ignore[reportCallIssue]
    x = torch.randn(3, 2, *(7, 6, 5)[:dimensions]).contiguous(memory_format=order)
    seen: list[fx.Node] = []

    def look(graph: fx.Graph) -> None:
        seen.extend(graph.find_nodes(op="call_function", target=BACKWARD))

    with inductor.patch(post_grad_custom_post_pass=look, fx_graph_cache=False):
        gradients = torch.autograd.grad(compiled_loss(_loss, on_cpu=True)(model, x)[0], list(model.parameters()))
    expected = torch.autograd.grad(_loss(model.double(), x.double())[0], list(model.parameters()))
    torch.testing.assert_close([g.double() for g in gradients], list(expected), rtol=1e-4, atol=1e-4)
    given = [node.all_input_nodes[0] for node in seen]
    assert len(given) == 4
    assert all(node.meta["val"].is_contiguous(memory_format=order) for node in given)
    assert len(set(given)) == 3  # one for both convolutions before the sum


def test_a_pass_of_the_users_own_stays(seed):
    model, x, seen = nn.Conv2d(2, 3, 1), torch.randn(2, 2, 3, 3), list[fx.Graph]()
    with inductor.patch(post_grad_custom_pre_pass=seen.append, fx_graph_cache=False):
        compiled_loss(_loss, on_cpu=True)(model, x)[0].backward()
    assert len(seen) == 2  # forward and backward


def test_what_lies_without_gaps_is_left_alone(seed):
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("gradient", "image", "weight")]
    for node, shape in zip(given, [(2, 4, 5, 5), (2, 3, 5, 5), (4, 3, 1, 1)], strict=True):
        node.meta["val"] = torch.empty(shape)
    numbers = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    graph.output(graph.call_function(BACKWARD, (*given, None, *numbers, [True, True, False])))
    before = str(graph)
    DenseGradients()(graph)
    assert str(graph) == before
