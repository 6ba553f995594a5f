"""The optimizers of a run, as `optimizer=muon`."""

import torch
from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.meanflow.config.optimizers import OPTIMIZERS
from fullstride.meanflow.config.schema import OptimizerConfig
from fullstride.settings.overrides import load_object
from fullstride.step.torch.muon import Muon
from fullstride.step.torch.optimizers import as_one, members

Tensors = dict[str, Tensor]


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a configuration, over all weights of a network; it can skip a step on the device."""
    return load_object(OPTIMIZERS[config.name], "optimizer")(config, model)


def adamw(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW (arXiv:1711.05101), fused: the one that can skip a step on the device."""
    return _adamw(config, list(model.parameters()))


def _adamw(config: OptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    betas = (config.beta1, config.beta2)
    options = {"lr": config.lr, "betas": betas, "eps": config.eps, "weight_decay": config.weight_decay}
    return torch.optim.AdamW(parameters, fused=True, **options)


def muon(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Muon for the matrices, AdamW for the rest, both at the same rate; see `matrices`."""
    by_muon = matrices(model)
    if not by_muon:
        raise ConfigError(f"optimizer=muon: {type(model).__name__} has no matrices, expected a network with some")
    own = {id(p) for p in by_muon}
    rest = [p for p in model.parameters() if id(p) not in own]
    first = Muon(by_muon, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    return as_one([first, *([_adamw(config, rest)] if rest else [])])


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of two dimensions or more that are no table of embeddings: linear layers, and filters."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return [p for p in model.parameters() if p.ndim >= 2 and id(p) not in tables]


def description(optimizer: torch.optim.Optimizer) -> str:
    """Which weights go to which of several optimizers; empty of one alone."""
    given = members(optimizer)
    if len(given) == 1:
        return ""
    own = [[p for group in each.param_groups for p in group["params"]] for each in given]
    counts = [f"{sum(p.numel() for p in ps):,} weights in {len(ps)} tensors by" for ps in own]
    return ", ".join(f"{count} {type(each).__name__}" for count, each in zip(counts, given, strict=True))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """The state by name: a parameter's number in the optimizer, a dot, and what it is."""
    state = optimizer.state
    numbered = enumerate(p for group in optimizer.param_groups for p in group["params"])
    return {f"{index}.{key}": value for index, p in numbered for key, value in state.get(p, {}).items()}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Take a state that `optimizer_tensors` gave."""
    start = 0
    for each in members(optimizer):
        parameters = [p for group in each.param_groups for p in group["params"]]
        state = {own: _entries(parameters[own], start + own, tensors) for own in range(len(parameters))}
        groups = each.state_dict()["param_groups"]
        each.load_state_dict({"state": {own: x for own, x in state.items() if x}, "param_groups": groups})
        start += len(parameters)


def _entries(parameter: nn.Parameter, index: int, tensors: Tensors) -> Tensors:
    found = {name.partition(".")[2]: x for name, x in tensors.items() if name.startswith(f"{index}.")}
    # In its parameter's memory order: a fused optimizer takes both as the rows of bytes that they are.
    alike = {key: x for key, x in found.items() if x.shape == parameter.shape}
    return found | {key: torch.empty_like(parameter).copy_(x) for key, x in alike.items()}
