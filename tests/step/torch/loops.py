"""Training loops as people write them, each a hand-written loop and the options of the same by `TrainStep`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fullstride.step.torch import Accumulation, Clip, TrainStep

STEPS = 7
Batch = dict[str, Tensor]
Optimizer = torch.optim.Optimizer


class Training(NamedTuple):
    """Model, optimizers, loss and data of a loop."""

    model: nn.Module
    optimizers: list[Any]
    loss: Callable[[nn.Module, Any], Any]
    batches: list[Batch]
    options: dict[str, Any]


class Loop(NamedTuple):
    """A loop: what makes its training on a device, one step by hand, and the backends that it can have.

    `exact` if an eager step rounds where the loop does.
    """

    make: Callable[[str], Training]
    step: Callable[[Training, Batch], Any]
    captured: bool = True
    compiled: bool = True
    exact: bool = True


def network(device: str) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)


def regression(device: str, make: Callable[[nn.Module], list[Any]], **options: Any) -> Training:
    """A small regression, by optimizers that `make` makes of its network."""
    model = network(device)
    batches = [{"x": torch.randn(6, 5).to(device), "y": torch.randn(6, 3).to(device)} for _ in range(STEPS)]
    return Training(model, make(model), squared, batches, options)


def squared(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def adamw(parameters: Any, lr: float = 1e-2) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def of_all(model: nn.Module) -> list[Any]:
    return [adamw(model.parameters())]


# Accumulation by tokens.


class Words(nn.Sequential):
    """A language model that predicts each token from the one before."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 11))


def mean_of_tokens(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def counted(model: nn.Module, batch: Batch) -> tuple[Tensor, Batch]:
    return mean_of_tokens(model, batch), {
        "tokens": tokens_of(batch),
        "one": torch.ones((), device=batch["labels"].device),
    }


def tokens_of(batch: Batch) -> Tensor:
    return (batch["labels"] != -100).sum()


def words(device: str, weight: Any) -> Training:
    """Sentences of very different lengths; the first micro-batch of each batch has no token at all."""
    model = Words().to(device)
    lengths = torch.tensor([0, 0, 7, 1, 2, 1])
    batches = []
    for _ in range(STEPS):
        tokens = torch.randint(11, (6, 7))
        labels = tokens.masked_fill(torch.arange(7) >= lengths[:, None], -100)
        batches.append({"tokens": tokens.to(device), "labels": labels.to(device)})
    loss = counted if isinstance(weight, str) else mean_of_tokens
    return Training(model, of_all(model), loss, batches, {"accumulate": Accumulation(3, weight)})


def step_of_words(training: Training, batch: Batch) -> None:
    """Micro-batches, each loss times its share of the tokens."""
    total = tokens_of(batch)
    for part in ({k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2, 4)):
        if count := int(tokens_of(part)):
            (mean_of_tokens(training.model, part) * (count / total)).backward()


# Clipping, and several optimizers.


def step_clipped_by_value(training: Training, batch: Batch) -> None:
    squared(training.model, batch).backward()
    nn.utils.clip_grad_value_(training.model.parameters(), 0.01)


def step_clipped_by_both(training: Training, batch: Batch) -> None:
    squared(training.model, batch).backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.2)
    nn.utils.clip_grad_value_(training.model.parameters(), 0.05)


def step_clipped(training: Training, batch: Batch) -> None:
    """By the norm in the optimizers' order, as the last bit of a sum depends on its order."""
    squared(training.model, batch).backward()
    given = [p for optimizer in training.optimizers for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(given, 0.2)


def split(model: Any) -> list[Any]:
    return [adamw(model[0].parameters()), adamw(model[2].parameters(), 3e-2)]


def muon(model: Any) -> list[Any]:
    flat = [p for p in model.parameters() if p.ndim == 1]
    return [torch.optim.Muon([model[0].weight, model[2].weight], lr=1e-2), adamw(flat)]


# What cannot be traced whole.


def torn(model: nn.Module, batch: Batch) -> Tensor:
    hidden = model[0](batch["x"])  # pyright: ignore[reportIndexIssue]
    torch._dynamo.graph_break()
    return (model[2](model[1](hidden)) - batch["y"]).square().mean()  # pyright: ignore[reportIndexIssue]


# Sparse gradients.


def sparse(device: str, make: Callable[[nn.Module], Any], **options: Any) -> Training:
    model = nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 3)).to(device)
    batches = [{"x": torch.randint(5, (6,)).to(device), "y": torch.randn(6, 3).to(device)} for _ in range(STEPS)]
    return Training(model, make(model), squared, batches, options)


def sparse_adam(model: Any) -> list[Any]:
    return [torch.optim.SparseAdam(model[0].parameters()), adamw(model[1].parameters())]


def plain_sgd(model: nn.Module) -> list[Any]:
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def step_clipped_sparse(training: Training, batch: Batch) -> None:
    """By the norm of dense gradients, as torch's own has none of sparse ones."""
    squared(training.model, batch).backward()
    given: list[Any] = [p.grad for p in training.model.parameters()]
    norm = torch.stack([x.to_dense().norm() for x in given]).norm()
    for gradient in given:
        gradient.mul_((0.2 / (norm + 1e-6)).clamp(max=1))


def step_clipped_sparse_by_value(training: Training, batch: Batch) -> bool:
    """By dense gradients."""
    squared(training.model, batch).backward()
    with torch.no_grad():
        for p in training.model.parameters():
            assert p.grad is not None
            p.sub_(0.1 * p.grad.to_dense().clamp(-0.01, 0.01))
    return True


def step_plainly(training: Training, batch: Batch) -> None:
    training.loss(training.model, batch).backward()


# Optimizers that evaluate the loss themselves.


class SAM(Optimizer):
    """Sharpness-aware minimization (arXiv:2010.01412, algorithm 1) around SGD, with the calls that its users know."""

    def __init__(self, parameters: Any, rho: float = 0.05):
        super().__init__(parameters, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        given = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in given]).norm()
        for p in given:
            self.state[p]["away"] = away = p.grad * (self.param_groups[0]["rho"] / norm)
            p.add_(away)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["away"])
        self.base.step()
        if zero_grad:
            self.zero_grad()


def noisy(batch: Batch, generator: torch.Generator | None) -> Batch:
    return batch | {"x": batch["x"] + 0.1 * torch.randn(batch["x"].shape, device=batch["x"].device)}


def step_of_sam(training: Training, batch: Batch) -> bool:
    """Both passes on the same noise, the second gradient clipped."""
    [optimizer], batch = training.optimizers, noisy(batch, None)
    squared(training.model, batch).backward()
    optimizer.first_step(zero_grad=True)
    step_clipped(training, batch)
    optimizer.second_step()
    return True


def step_of_lbfgs(training: Training, batch: Batch) -> bool:
    [optimizer], batch = training.optimizers, noisy(batch, None)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = squared(training.model, batch)
        value.backward()
        return value

    optimizer.step(closure)
    return True


def lbfgs(model: nn.Module) -> list[Any]:
    return [torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")]


# Half precision.


def half(device: str, make: Callable[[nn.Module], list[Any]] = of_all, scale: float = 2.0**20) -> Training:
    """Gradients that overflow at the first scales, unless they are small."""
    scaler = torch.amp.GradScaler(device, init_scale=scale, growth_interval=2)
    return regression(device, make, precision="fp16", scaler=scaler, clip=0.5)


def step_of_half(training: Training, batch: Batch) -> bool:
    scaler, device = training.options["scaler"], batch["x"].device.type
    with torch.autocast(device, torch.float16):
        value = squared(training.model, batch)
    scaler.scale(value).backward()
    for optimizer in training.optimizers:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
    for optimizer in training.optimizers:
        scaler.step(optimizer)
    scaler.update()
    return True


LOOPS = {
    "tokens, by a function": Loop(lambda device: words(device, tokens_of), step_of_words),
    "tokens, by the loss": Loop(lambda device: words(device, "tokens"), step_of_words, exact=False),
    "clip by value": Loop(lambda device: regression(device, of_all, clip=Clip(value=0.01)), step_clipped_by_value),
    "clip by both": Loop(lambda device: regression(device, of_all, clip=Clip(0.2, 0.05)), step_clipped_by_both),
    "two optimizers": Loop(lambda device: regression(device, split, clip=0.2), step_clipped),
    "Muon and AdamW": Loop(lambda device: regression(device, muon, clip=0.2), step_clipped, captured=False),
    "graph breaks": Loop(lambda device: regression(device, of_all, fullgraph=False)._replace(loss=torn), step_plainly),
    "SparseAdam": Loop(lambda device: sparse(device, sparse_adam), step_plainly, captured=False, compiled=False),
    "sparse SGD": Loop(
        lambda device: sparse(device, plain_sgd, clip=0.2), step_clipped_sparse, captured=False, compiled=False
    ),
    "sparse SGD by value": Loop(
        lambda device: sparse(device, plain_sgd, clip=Clip(value=0.01)),
        step_clipped_sparse_by_value,
        captured=False,
        compiled=False,
        exact=False,
    ),
    "SAM": Loop(
        lambda device: regression(device, lambda model: [SAM(model.parameters())], clip=0.2, draw=noisy),
        step_of_sam,
        captured=False,
        compiled=False,
    ),
    "LBFGS": Loop(lambda device: regression(device, lbfgs, draw=noisy), step_of_lbfgs, captured=False, compiled=False),
    "fp16": Loop(half, step_of_half),
    "fp16, small scale": Loop(lambda device: half(device, scale=2.0**8), step_of_half),
    "fp16, two optimizers": Loop(lambda device: half(device, split), step_of_half),
}


def made(loop: Loop, seed: int, device: str = "cpu") -> Training:
    torch.manual_seed(seed)
    return loop.make(device)


def state(training: Training) -> list[Any]:
    """Return what must end alike."""
    scaler = training.options.get("scaler")
    kept = [own for each in training.optimizers for own in each.state_dict()["state"].values()]
    return [training.model.state_dict(), kept, scaler and scaler.state_dict()]


def step_of(training: Training, **options: Any) -> TrainStep:
    optimizers = training.optimizers if len(training.optimizers) > 1 else training.optimizers[0]
    return TrainStep(training.loss, training.model, optimizers, **training.options | options)


def by_step(loop: Loop, seed: int, device: str = "cpu", **options: Any) -> tuple[list[Any], TrainStep]:
    """Run the loop by `TrainStep`."""
    training = made(loop, seed, device)
    step = step_of(training, log=lambda _: None, **options)
    for batch in training.batches:
        step(batch)
    return state(training), step


def by_hand(loop: Loop, seed: int, device: str = "cpu") -> list[Any]:
    """Run the hand-written loop."""
    training = made(loop, seed, device)
    for batch in training.batches:
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        if not loop.step(training, batch):  # or it has stepped
            for optimizer in training.optimizers:
                optimizer.step()
    return state(training)
