"""The random number generators of a run in its checkpoints, each process's its own."""

import numpy as np
import torch
from torch import Tensor

from fullstride.errors import ConfigError

Tensors = dict[str, Tensor]


def stream_tensors(generator: torch.Generator) -> Tensors:
    """The states of the run's generator and of PyTorch's own."""
    tensors = {"generator": generator.get_state(), "cpu": torch.get_rng_state()}
    if generator.device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(generator.device)
    return tensors


def load_streams(generator: torch.Generator, tensors: Tensors) -> None:
    """Return to states that `stream_tensors` gave.

    Raises:
        ConfigError: if they are another device's.

    """
    if ("cuda" in tensors) != (generator.device.type == "cuda"):
        kind = "CUDA" if "cuda" in tensors else "no CUDA"
        raise ConfigError(
            f"the checkpoint was made with {kind} device, the device is {generator.device}: their random numbers "
            "differ; go on with the device it was made on, or use another run_name"
        )
    generator.set_state(tensors["generator"])
    torch.set_rng_state(tensors["cpu"])
    if generator.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["cuda"], generator.device)


def together(processes: list[Tensors]) -> Tensors:
    """Every process's states by name, the first one's under their plain names."""
    return {_prefix(rank) + name: x for rank, tensors in enumerate(processes) for name, x in tensors.items()}


def of_process(tensors: Tensors, rank: int) -> Tensors:
    """One process's states out of `together`."""
    split = {name: name.rpartition(".") for name in tensors}
    return {leaf: tensors[name] for name, (group, dot, leaf) in split.items() if group + dot == _prefix(rank)}


def _prefix(rank: int) -> str:
    return f"{rank}." if rank else ""


def mixed_seed(*numbers: int) -> int:
    """A seed in all of whose bits each of the numbers counts: on the CPU only the low 32 do."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) % 2**63
