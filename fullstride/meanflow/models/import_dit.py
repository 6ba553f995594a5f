"""Weights of diffusion transformers in other projects under this library's names.

willisma/SiT and facebookresearch/DiT have the same layers as `DiT` here and one set of names; diffusers has its own.
Weights of theirs know no t - r: its embedding starts at zero, so that u(z, r, t) is their output for every r.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.meanflow.models.dit import TIME_FEATURES, DiT, wave_frequencies
from fullstride.runs.atomic_files import note

State = Mapping[str, Tensor]
DIT_STEPS = 1000  # of DiT's diffusion; its times are their numbers

_ENDS = {
    "x_embedder.proj.weight": "patch_in.weight",
    "x_embedder.proj.bias": "patch_in.bias",
    "t_embedder.mlp.0.weight": "conditioning.time.hidden.weight",
    "t_embedder.mlp.0.bias": "conditioning.time.hidden.bias",
    "t_embedder.mlp.2.weight": "conditioning.time.out.weight",
    "t_embedder.mlp.2.bias": "conditioning.time.out.bias",
    "y_embedder.embedding_table.weight": "conditioning.label.weight",
    "final_layer.adaLN_modulation.1.weight": "modulation_out.linear.weight",
    "final_layer.adaLN_modulation.1.bias": "modulation_out.linear.bias",
    "final_layer.linear.weight": "patch_out.weight",
    "final_layer.linear.bias": "patch_out.bias",
}
_LAYERS = {
    "adaLN_modulation.1": "modulation.linear",
    "attn.qkv": "attention.qkv",
    "attn.proj": "attention.out",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.2",
}
_DIFFUSERS_ENDS = {
    "pos_embed.proj": "x_embedder.proj",
    "proj_out_1": "final_layer.adaLN_modulation.1",
    "proj_out_2": "final_layer.linear",
}
_DIFFUSERS_LAYERS = {
    "norm1.linear": "adaLN_modulation.1",
    "attn1.to_out.0": "attn.proj",
    "ff.net.0.proj": "mlp.fc1",
    "ff.net.2": "mlp.fc2",
}
_DIFFUSERS_EMBEDDING = {
    "timestep_embedder.linear_1": "t_embedder.mlp.0",
    "timestep_embedder.linear_2": "t_embedder.mlp.2",
    "class_embedder.embedding_table": "y_embedder.embedding_table",
}


def from_sit(state: State, network: nn.Module) -> dict[str, Tensor]:
    """A velocity of willisma/SiT's linear path, as a velocity here.

    SiT has noise at time 0 and data at 1 and predicts data - noise; here u(z, t, t) = -v(z, 1 - t). The sign goes into
    the last layer. The time goes into the first layer of its embedding, whose inputs cos(w (1 - t)) and sin(w (1 - t))
    are a rotation of cos(w t) and sin(w t) by w.

    Args:
        state: SiT's tensors by name.
        network: the network that they are for.

    Raises:
        ConfigError: if the network is no `DiT` or has another `time_scale`, or a tensor is not one of SiT's.

    """
    own = _converted(state, _dit(network, 1.0, "SiT"))
    for name in ("patch_out.weight", "patch_out.bias"):
        own[name] = -own[name]
    name = "conditioning.time.hidden.weight"
    wave = wave_frequencies(TIME_FEATURES // 2, torch.float64)
    cos, sin = own[name].double().chunk(2, dim=1)
    turned = [cos * wave.cos() + sin * wave.sin(), cos * wave.sin() - sin * wave.cos()]
    own[name] = torch.cat(turned, dim=1).to(own[name].dtype)
    return own


def from_dit(state: State, network: nn.Module) -> dict[str, Tensor]:
    """The noise that facebookresearch/DiT predicts at its step 1000 t: where a training starts, and no velocity.

    Args:
        state: DiT's tensors by name.
        network: the network that they are for, of `time_scale` 1000.

    Raises:
        ConfigError: if the network is no `DiT` or has another `time_scale`, or a tensor is not one of DiT's.

    """
    own = _converted(state, _dit(network, float(DIT_STEPS), "DiT"))
    note("DiT predicts noise of a diffusion, not the velocity of a straight path: samples need training first")
    return own


def from_diffusers_dit(state: State, network: nn.Module) -> dict[str, Tensor]:
    """Weights of diffusers' `DiTTransformer2DModel`; as `from_dit`, with the official network's times and norms.

    diffusers itself computes the waves of its times at slightly other frequencies than the network that it has the
    weights of, and adds 1e-5 in place of 1e-6 in every second norm.

    Raises:
        ConfigError: as `from_dit`, or if its blocks embed times or classes differently.

    """
    found: dict[str, Tensor] = {}
    blocks = {name.split(".")[1] for name in state if name.startswith("transformer_blocks.")}
    for name, tensor in state.items():
        parts, (layer, _, leaf) = name.split("."), name.rpartition(".")
        if parts[0] == "transformer_blocks":
            inner = layer.split(".", 2)[2]
            if inner.startswith("norm1.emb."):
                key = f"{_official(_DIFFUSERS_EMBEDDING, inner.removeprefix('norm1.emb.'), name)}.{leaf}"
                if key in found and not torch.equal(found[key], tensor):
                    raise ConfigError(f"{name} differs from block 0's, expected one embedding for all blocks")
                found[key] = tensor
            elif not inner.startswith("attn1.to_") or inner == "attn1.to_out.0":
                found[f"blocks.{parts[1]}.{_official(_DIFFUSERS_LAYERS, inner, name)}.{leaf}"] = tensor
        else:
            found[f"{_official(_DIFFUSERS_ENDS, layer, name)}.{leaf}"] = tensor
    for block in blocks:
        for leaf in ("weight", "bias"):
            names = [f"transformer_blocks.{block}.attn1.to_{part}.{leaf}" for part in "qkv"]
            if missing := [name for name in names if name not in state]:
                raise ConfigError(f"no {', '.join(missing)}, expected the names of diffusers' DiTTransformer2DModel")
            found[f"blocks.{block}.attn.qkv.{leaf}"] = torch.cat([state[name] for name in names])
    return from_dit(found, network)


def _official(names: Mapping[str, str], layer: str, name: str) -> str:
    if layer not in names:
        raise ConfigError(f"the weights have {name}, expected the names of diffusers' DiTTransformer2DModel")
    return names[layer]


def _dit(network: nn.Module, scale: float, form: str) -> DiT:
    if not isinstance(network, DiT):
        raise ConfigError(f"weights of {form} for a {type(network).__name__}, expected a DiT such as model=dit_xl2")
    if network.time_scale != scale:
        raise ConfigError(f"weights of {form} with model.time_scale={network.time_scale:g}, expected {scale:g}")
    return network


def _converted(state: State, network: DiT) -> dict[str, Tensor]:
    """The tensors under the names here, with the same function; what is left over keeps its name."""
    own: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name == "pos_embed":
            _check_positions(tensor, network)
        else:
            own[_renamed(name)] = tensor
    return _fitted(own, network)


def _renamed(name: str) -> str:
    layer, _, leaf = name.rpartition(".")
    parts = layer.split(".", 2)
    if parts[0] == "blocks" and len(parts) == 3 and parts[2] in _LAYERS:
        return f"blocks.{parts[1]}.{_LAYERS[parts[2]]}.{leaf}"
    return _ENDS.get(name, name)


def _fitted(own: dict[str, Tensor], network: DiT) -> dict[str, Tensor]:
    patch = own.get("patch_in.weight")
    if patch is not None and patch.ndim == 4:  # a convolution over (channel, row, column)
        own["patch_in.weight"] = patch.permute(0, 2, 3, 1).flatten(1)
        _drop_variance(own, patch.shape[1], patch.shape[2] * patch.shape[3])
    table, bias = own.get("conditioning.label.weight"), own.get("conditioning.time.out.bias")
    if network.conditioning.label is None and table is not None and bias is not None and table.shape[1:] == bias.shape:
        own["conditioning.time.out.bias"] = bias + own.pop("conditioning.label.weight")[-1]
        note("the weights' embedding of 'no class' is part of the network without classes")
    gap = network.conditioning.gap.state_dict()
    own |= {f"conditioning.gap.{key}": torch.zeros_like(x) if "out" in key else x for key, x in gap.items()}
    return own


def _drop_variance(own: dict[str, Tensor], channels: int, pixels: int) -> None:
    """Keep the first of two halves of the channels that the last layer gives: the other is a learned variance."""
    names = [name for name in ("patch_out.weight", "patch_out.bias") if name in own]
    if not all(len(own[name]) == 2 * channels * pixels for name in names):
        return
    for name in names:
        own[name] = own[name].unflatten(0, (pixels, 2 * channels))[:, :channels].flatten(0, 1)
    note("the weights' learned variance, half of what the last layer gives, is left out")


def _check_positions(given: Tensor, network: DiT) -> None:
    expected = network.position
    if given.shape[1:] != expected.shape:
        raise ConfigError(
            f"pos_embed has shape {tuple(given.shape)}, expected (1, {', '.join(map(str, expected.shape))}): the "
            "weights are of another image size, patch size or width"
        )
    if not torch.allclose(given[0].double().cpu(), expected.double().cpu(), rtol=0, atol=1e-5):
        raise ConfigError(
            "pos_embed is not the fixed sines and cosines of DiT, expected those; they are not learned here"
        )
