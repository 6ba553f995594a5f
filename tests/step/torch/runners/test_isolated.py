"""The comparison with eager fp32 leaves no trace, whatever state a loss, a model or its hooks have."""

import collections
import copy
import enum
import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fullstride.step.torch import TrainStep

LOG: list[int] = []
COUNT = 0
TEACHER: nn.Module = nn.Identity()
SETTINGS = {"seen": 0}


class Training(NamedTuple):
    """Objects that are trained, and others that may show a trace."""

    loss: Callable[[nn.Module, Any], Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    others: Callable[[], Any] = lambda: None


def plain(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def net(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), *more, nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Stateful(nn.Module):
    """Counts in an attribute, rescales by it, remembers, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history, self.last = 0, [], None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(float(x.detach().float().mean()))
        y = x * (1 + 0.1 * self.calls) + (0 if self.last is None else 0.1 * self.last)
        self.last = y.detach().mean()
        return y


class Global(nn.Module):
    """Counts in globals of this file and in its class."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        LOG.append(COUNT)
        SETTINGS["seen"] += 1
        Global.count += 1
        return x * (1 + 0.01 * COUNT)


class Lazy(nn.Module):
    """Registers a mask when it first knows the length; another buffer grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grown", torch.zeros(0))
        self.register_buffer("same", torch.ones(1).expand(8))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(x.shape[-1]))
        self.grown = torch.cat([self.grown, x.detach().float().mean()[None]])
        return x * self.get_buffer("mask") * self.get_buffer("same") * (1 + self.grown.mean())


class Carried(nn.Module):
    """A recurrent state carried within the graph of one step, and cut between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.state = nn.GRUCell(8, 8), None

    def forward(self, x: Tensor) -> Tensor:
        state = None if self.state is None else self.state.detach().to(x.dtype)
        self.state = self.cell(x, state)
        return self.state


def teacher_in_a_closure() -> Training:
    teacher, model = net(nn.BatchNorm1d(8)), net()
    loss = lambda m, b: (m(b["x"]) - teacher(b["x"]).detach()).square().mean()  # noqa: E731
    return Training(loss, model, sgd(model), teacher.state_dict)


def teacher_in_a_global() -> Training:
    global TEACHER
    TEACHER, model = net(nn.BatchNorm1d(8)), net()
    return Training(
        lambda m, b: (m(b["x"]) - TEACHER(b["x"]).detach()).square().mean(), model, sgd(model), TEACHER.state_dict
    )


def head_in_the_loss() -> Training:
    class Loss:
        def __init__(self) -> None:
            self.head, self.seen = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), 0

        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            self.seen += 1
            return (self.head(model(batch["x"])) - batch["y"]).square().mean() * self.seen

    loss, model = Loss(), net()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.head.parameters()], lr=0.1)
    return Training(loss, model, optimizer, lambda: (loss.seen, loss.head.state_dict()))


def of(*more: nn.Module, others: Callable[[nn.Module], Any] = lambda _: None) -> Training:
    model = net(*more)
    return Training(plain, model, sgd(model), lambda: others(model))


def attributes() -> Training:
    return of(module := Stateful(), others=lambda _: (module.calls, module.history, module.last))


def globals_() -> Training:
    global COUNT
    COUNT = SETTINGS["seen"] = Global.count = 0
    LOG.clear()
    return of(Global(), others=lambda _: (COUNT, list(LOG), dict(SETTINGS), Global.count))


def hooks() -> Training:
    training, fired = of(nn.BatchNorm1d(8)), collections.Counter()
    total = 0

    def forward(*_: Any) -> None:
        nonlocal total
        total += 1

    training.model.register_forward_hook(forward)
    training.model[1].register_full_backward_hook(lambda *_: fired.update(["backward"]))  # pyright: ignore
    training.model[0].weight.register_hook(lambda g: (fired.update(["weight"]), 0.5 * g)[1])  # pyright: ignore
    return training._replace(others=lambda: (dict(fired), total))


def spectral_norms() -> Training:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 8)), nn.utils.spectral_norm(nn.Linear(8, 3)))
    return Training(plain, model, sgd(model))


def spectral_norm() -> Training:
    return of(parametrizations.spectral_norm(nn.Linear(8, 8)))


def weight_norms() -> Training:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 8)), parametrizations.weight_norm(nn.Linear(8, 3)))  # pyright: ignore
    return Training(plain, model, sgd(model))


def in_backward() -> Training:
    model = net()
    each = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def update(p: Tensor) -> None:
        each[p].step()  # pyright: ignore[reportArgumentType]
        each[p].zero_grad()  # pyright: ignore[reportArgumentType]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return Training(plain, model, torch.optim.SGD(model.parameters(), lr=0.0))


def random_numbers() -> Training:
    # Not Python's global numbers, which the checks of annotations draw too.
    model, own, other = net(nn.Dropout(0.3)), np.random.default_rng(0), random.Random(0)

    def loss(m: nn.Module, b: Any) -> Tensor:
        share = other.random() + np.random.rand() + own.random()
        return plain(m, b | {"x": share * b["x"] + torch.randn_like(b["x"])})

    return Training(loss, model, sgd(model), lambda: (other.random(), np.random.rand(), own.random()))


def batch_in_place() -> Training:
    model = net()
    return Training(lambda m, b: plain(m, b | {"x": b["x"].mul_(2)}), model, sgd(model))


def clipped_weights() -> Training:
    class Forced(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            with torch.no_grad():
                self.weight.copy_(self.weight / self.weight.norm())
            return super().forward(x)

    return of(Forced(8, 8))


def queue_of_negatives() -> Training:
    queue, model = collections.deque([torch.zeros(3)], maxlen=4), net()

    def loss(m: nn.Module, b: Any, seen: Any = [0]) -> Tensor:  # noqa: B006
        seen[0] += 1
        out = m(b["x"])
        queue.append(out.detach().float().mean(0))
        return (out - torch.stack(list(queue)).mean(0)).square().mean() * seen[0]

    return Training(loss, model, sgd(model), lambda: list(queue))


class Order(enum.Enum):
    """Orders of dimensions, with members that cannot be bound to anything else."""

    FIRST = (0, 1)
    LAST = (1, 0)


def enumeration() -> Training:
    model = net()
    return Training(lambda m, b: plain(m, b) * (1 + len(Order.LAST.value)), model, sgd(model))


class ReadOnly(type):
    """Metaclass of classes whose attributes cannot be set."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is read-only")


class Sealed(metaclass=ReadOnly):
    """Holds a list that grows."""

    seen: list[int] = []  # noqa: RUF012


CASES = [
    enumeration,
    teacher_in_a_closure,
    teacher_in_a_global,
    head_in_the_loss,
    attributes,
    globals_,
    lambda: of(Lazy()),
    lambda: of(Carried()),
    hooks,
    spectral_norms,
    weight_norms,
    in_backward,
    random_numbers,
    batch_in_place,
    clipped_weights,
    queue_of_negatives,
]


def given(seed: int, count: int = 4) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(7, 5, generator=g), "y": torch.randn(7, 3, generator=g)} for _ in range(count)]


def started(case: Callable[[], Training], seed: int) -> Training:
    torch.manual_seed(seed)
    np.random.seed(seed)
    return case()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_eager_steps_are_a_loop_written_by_hand_to_the_last_bit(case, precision, seed):
    found = []
    for by_hand in (True, False):
        loss, model, optimizer, others = started(case, seed)
        step = TrainStep(loss, model, optimizer, precision=precision, backend="eager", log=pytest.fail)
        value = torch.zeros(())
        for batch in given(seed):
            if by_hand:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    value = loss(model, batch)
                value.backward()
                optimizer.step()
            else:
                value = step(batch)["loss"]
        assert len(step.errors) == (precision == "bf16" and not by_hand)
        found.append([copy.deepcopy(others()), model.state_dict(), torch.rand(1), value.detach().float()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize(
    "case", [teacher_in_a_closure, teacher_in_a_global, spectral_norm, in_backward], ids=lambda case: case.__name__
)
def test_a_compiled_step_is_compared_without_a_trace(case, seed):
    found = []
    for gate in (True, False):
        loss, model, optimizer, others = started(case, seed)
        step = TrainStep(loss, model, optimizer, backend="compile", check_first_step=gate, log=pytest.fail)
        for batch in given(seed):
            step(batch)
        assert len(step.errors) == gate
        found.append([copy.deepcopy(others()), model.state_dict()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def _generator() -> Any:
    yield from itertools.repeat(1.0)


def _file() -> Any:
    return open("/dev/zero", "rb")


@pytest.mark.parametrize("state", [_generator, _file])
def test_a_step_whose_state_cannot_be_copied_is_not_compared_and_says_so(state, seed):
    source, model = state(), net()

    def loss(m: nn.Module, b: Any) -> Tensor:
        return plain(m, b) * (1.0 if hasattr(source, "read") and source.read(1) else next(source, 1.0))

    said = list[str]()
    step = TrainStep(loss, model, sgd(model), precision="bf16", backend="eager", log=said.append)
    for batch in given(seed):
        step(batch)
    source.close()
    assert not step.errors
    [line] = said
    assert line.startswith("backend=eager, usual shapes: not compared with eager fp32: source cannot be copied (TypeE")


def test_a_class_that_cannot_be_changed_is_named(seed):
    model, said = net(), list[str]()

    def loss(m: nn.Module, b: Any) -> Tensor:
        Sealed.seen.append(1)
        return plain(m, b)

    Sealed.seen.clear()
    step = TrainStep(loss, model, sgd(model), precision="bf16", backend="eager", log=said.append)
    for batch in given(seed):
        step(batch)
    assert len(Sealed.seen) == len(given(seed))  # the comparison left no trace
    [line] = said
    assert "not compared with eager fp32: seen cannot be bound (AttributeError: seen is read-only)" in line
