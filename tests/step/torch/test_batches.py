"""Batches of every kind that a loss may want, and how they are cut."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from fullstride.device.cuda_graph import copy_into, static_input
from fullstride.device.tensor_trees import micro_batches
from fullstride.step.torch import TrainStep
from fullstride.step.torch import train_step as train_step_module
from fullstride.step.torch.runners import backends as backends_module
from tests.step.torch.networks import OnHost, Rerun


@dataclass(frozen=True)
class Pair:
    x: Tensor
    y: Tensor
    name: str = "pair"


class Opaque:
    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y = x, y


def draw(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=g), torch.randn(6, 4, generator=g)


def graph(seed: int) -> Any:
    x, y = draw(seed)
    edges = torch.randint(6, (2, 11), generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": y, "edges": edges, "scale": torch.tensor(1.5), "count": 6, "none": None}


def graph_loss(model: nn.Module, b: Any) -> Tensor:
    out = torch.zeros_like(b["x"]).index_add(0, b["edges"][1], model(b["x"])[b["edges"][0]].float())
    return (b["scale"] * out - b["y"]).square().mean()


KINDS: dict[str, tuple[Any, Any]] = {
    "graph": (graph, graph_loss),
    "packed": (
        lambda seed: pack_sequence([draw(seed)[0][:n] for n in (5, 3, 2)]),
        lambda model, b: model(b.data).square().mean() * len(b.batch_sizes),
    ),
    "dataclass": (lambda seed: Pair(*draw(seed)), lambda model, b: (model(b.x) - b.y).square().mean()),
    "user dict": (
        lambda seed: UserDict(zip("xy", draw(seed), strict=True)),
        lambda model, b: (model(b["x"]) - b["y"]).square().mean(),
    ),
    "numpy": (
        lambda seed: [x.numpy() for x in draw(seed)],
        lambda model, b: (model(torch.from_numpy(b[0])) - torch.from_numpy(b[1])).square().mean(),
    ),
    "object": (lambda seed: Opaque(*draw(seed)), lambda model, b: (model(b.x) - b.y).square().mean()),
    "time first": (
        lambda seed: {"x": draw(seed)[0].view(3, 2, 4), "y": draw(seed)[1][:2]},
        lambda model, b: (model(b["x"]).mean(0) - b["y"]).square().mean(),
    ),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["eager", "graph"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_batch_that_is_not_cut_trains_as_by_hand(kind, backend, precision, monkeypatch):
    monkeypatch.setattr(backends_module, "GraphRunner", OnHost)
    monkeypatch.setattr(train_step_module, "check_backend", lambda *_: None)
    monkeypatch.setattr(Rerun, "recorded", 0)
    made, loss = KINDS[kind]
    found = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        step = TrainStep(loss, model, optimizer, backend=backend, precision=precision, log=lambda _: None)
        for seed in range(7):
            if not by_hand:
                step(made(seed))
                continue
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                value = loss(model, made(seed))
            value.backward()
            optimizer.step()
        found.append(list(model.parameters()))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    # What a record could not read anew is never recorded.
    assert Rerun.recorded == (backend == "graph" and kind not in ("numpy", "object"))


def test_samples_are_cut_wherever_they_are():
    x, y = draw(0)
    batch = {"pair": Pair(x, y), "rows": x.numpy(), "scale": torch.tensor(2.0), "text": list("abcdef"), "two": ["a", 1]}
    parts = micro_batches(batch, 4)
    assert [share for _, share in parts] == pytest.approx([1 / 6, 2 / 6, 1 / 6, 2 / 6])
    torch.testing.assert_close(torch.cat([p["pair"].y for p, _ in parts]), y)
    np.testing.assert_array_equal(np.concatenate([p["rows"] for p, _ in parts]), x.numpy())
    assert "".join(t for p, _ in parts for t in p["text"]) == "abcdef"
    assert all(p["two"] == ["a", 1] and p["scale"] == 2 and p["pair"].name == "pair" for p, _ in parts)
    assert batch["pair"].x is x


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_without_samples_is_refused(count):
    with pytest.raises(ValueError, match=r"the batch's tensors have .*expected"):
        micro_batches({"x": torch.ones(0, 3)}, count)


def test_a_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match=r"first dimensions \[\(2,\), \(6,\)\], expected one size for all"):
        micro_batches(graph(0), 2)


def test_a_record_reads_what_lies_in_dataclasses_and_user_dicts():
    batch: Any = UserDict(a=Pair(*draw(0)), b=[torch.ones(2)])
    place = static_input(batch)
    copy_into(place, UserDict(a=Pair(*draw(1)), b=[torch.zeros(2)]))
    torch.testing.assert_close((place["a"].x, place["a"].y, place["b"][0]), (*draw(1), torch.zeros(2)))
    assert torch.equal(batch["a"].x, draw(0)[0])
