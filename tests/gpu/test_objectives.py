"""Steps of the newer objectives as CUDA graphs: `python -m pytest tests/gpu/test_objectives.py`."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fullstride.device.precision import set_precision
from fullstride.step.torch import Averages, TrainStep
from tests.meanflow.objective.newer import NEWER, drawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 3
CUDA = torch.device("cuda")
# Compilation is most of the time: a graph of eager kernels for each objective, compiled ones for those of a kind.
COMPILED = ("imf_whole", "tvm", "cmt", "perceptual")
CASES = [*((name, "graph") for name in NEWER), *((name, "compile+graph") for name in COMPILED)]


def learned(name: str, backend: str, seed: int) -> tuple[list[float], nn.Module]:
    """Losses of some steps on fresh noise and times, and the network that they leave."""
    torch.manual_seed(seed)
    net, loss = NEWER[name]()
    given = [tree_map(lambda x: x.to(CUDA), drawn(name, loss, seed + i)) for i in range(STEPS)]
    moved = {key: on_gpu(value) for key, value in vars(loss).items() if key in ("teacher", "average", "features")}
    net, loss = net.to(CUDA), dataclasses.replace(loss, split="static" if name == "tvm" else "shared", **moved)

    def objective(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        return loss.at(model, **batch)

    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    step = TrainStep(objective, net, optimizer, ema=Averages(net, [0.9]), backend=backend)
    return [step(batch)["loss"].item() for batch in given], net


def on_gpu(value: Any) -> Any:
    """A teacher or a network on the GPU; None stays."""
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, network=copy.deepcopy(value.network).to(CUDA))  # pyright: ignore
    return value.to(CUDA) if isinstance(value, nn.Module) else value


@pytest.fixture(scope="module")
def eager():
    """Results of eager steps by objective, each made once."""
    made: dict[str, tuple[list[float], nn.Module]] = {}

    def get(name: str) -> tuple[list[float], nn.Module]:
        if name not in made:
            made[name] = learned(name, "eager", 3)
        return made[name]

    return get


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_a_captured_step_learns_what_an_eager_one_does(name, backend, eager):
    set_precision("fp32", CUDA)
    losses, net = eager(name)
    found, other = learned(name, backend, 3)
    assert len(set(losses)) == STEPS
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-3, atol=0)
    # Adam's first steps are of the size of the rate whatever the gradient: rounding alone turns few of them.
    apart = torch.cat([(a - b).flatten() for a, b in zip(net.parameters(), other.parameters(), strict=True)])
    whole = torch.cat([p.flatten() for p in net.parameters()])
    assert apart.norm() < 2e-2 * whole.norm()
