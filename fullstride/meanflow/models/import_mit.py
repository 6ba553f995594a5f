"""Weights of Lyy-iiis/imeanflow's transformer (its PyTorch branch) under this library's names.

Its network is `MiT`; names differ, and so does the order of the features of queries and keys: there features 2i and
2i + 1 of a head are turned together, here i and i + d/2.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.meanflow.models.mit import MiT
from fullstride.runs.atomic_files import note

State = dict[str, Tensor]

_EMBEDDERS = {
    "gap": ("h_embedder", "time_tokens"),
    "scale": ("omega_embedder", "omega_tokens"),
    "start": ("cfg_t_start_embedder", "t_min_tokens"),
    "end": ("cfg_t_end_embedder", "t_max_tokens"),
}
_WRAPPERS = ("._flax_linear", "._flax_embedding")


def from_imf(state: Mapping[str, Tensor], network: nn.Module) -> State:
    """The tensors of an improved MeanFlow under the names here, with the same function.

    Published weights lack the blocks of v. They start as those of u, which is v where r = t.

    Args:
        state: its tensors by name.
        network: the network that they are for.

    Raises:
        ConfigError: if the network is no `MiT`, or a tensor is missing.

    """
    if not isinstance(network, MiT):
        raise ConfigError(f"weights of iMF for a {type(network).__name__}, expected a MiT such as model=mit_b2")
    left = {_plain(name): tensor for name, tensor in state.items()}
    try:
        own = _converted(left, len(network.blocks), len(network.u.blocks))
    except KeyError as error:
        raise ConfigError(f"no {error.args[0]} in the weights, expected the names of iMF's imfDiT") from None
    note("iMF was trained on latents of mean 0 and deviation 1 in each channel: others need training first")
    return own | left


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("net.")


def _converted(left: State, shared: int, last: int) -> State:
    """The tensors here; those that are used leave `left`."""
    own = {f"patch_in.{leaf}": left.pop(f"x_embedder.proj.{leaf}") for leaf in ("weight", "bias")}
    own["patch_in.weight"] = own["patch_in.weight"].permute(0, 2, 3, 1).flatten(1)
    own |= {"label.weight": left.pop("y_embedder.embedding_table.weight"), "label_tokens": left.pop("class_tokens")}
    for name, (embedder, tokens) in _EMBEDDERS.items():
        own[f"{name}.tokens"] = left.pop(tokens)
        for layer, place in (("hidden", 0), ("out", 2)):
            own |= {f"{name}.{layer}.{leaf}": left.pop(f"{embedder}.mlp.{place}.{leaf}") for leaf in ("weight", "bias")}
    for i in range(shared):
        own |= _block(left, f"shared_blocks.{i}", f"blocks.{i}")
    if "v_heads.0.attn_scale" not in left:
        left |= {f"v_{k.removeprefix('u_')}": x for k, x in left.items() if k.startswith("u_")}
        note("the weights have no blocks for v: its head starts as that of u")
    for head in "uv":
        for i in range(last):
            own |= _block(left, f"{head}_heads.{i}", f"{head}.blocks.{i}")
        own[f"{head}.norm"] = left.pop(f"{head}_final_layer.norm.weight")
        own |= {
            f"{head}.patch_out.{leaf}": left.pop(f"{head}_final_layer.linear.{leaf}") for leaf in ("weight", "bias")
        }
    return own


def _block(left: State, there: str, here: str) -> State:
    def take(name: str) -> Tensor:
        return left.pop(f"{there}.{name}")

    norms = [take(f"attn.{part}_norm.weight") for part in "qk"]

    def halves(x: Tensor) -> Tensor:
        """The even features of each head, then the odd ones."""
        features = x.unflatten(0, (-1, len(norms[0])))
        return torch.cat([features[:, 0::2], features[:, 1::2]], dim=1).flatten(0, 1)

    q, k, v = (take(f"attn.{part}_proj.weight") for part in "qkv")
    return {
        f"{here}.norm": torch.stack([take("norm1.weight"), take("norm2.weight")]),
        f"{here}.qk_norm": torch.stack([halves(x) for x in norms]),
        f"{here}.gates": torch.stack([take("attn_scale"), take("mlp_scale")]),
        f"{here}.qkv.weight": torch.cat([halves(q), halves(k), v]),
        f"{here}.out.weight": take("attn.out_proj.weight"),
        f"{here}.gated.weight": take("mlp.w1.weight"),
        f"{here}.linear.weight": take("mlp.w3.weight"),
        f"{here}.down.weight": take("mlp.w2.weight"),
    }
