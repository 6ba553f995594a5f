"""Weights of Gsunshine/py-meanflow's CIFAR-10 network under this library's names."""

from collections.abc import Mapping

from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.meanflow.models.song_unet import SongUNet
from fullstride.runs.atomic_files import note

_BLOCK = {
    "norm0": "norm1",
    "conv0": "conv1",
    "affine": "shift",
    "norm1": "norm2",
    "conv1": "conv2",
    "skip": "skip",
    "norm2": "attention.norm",
    "qkv": "attention.qkv",
    "proj": "attention.out",
}
_WHOLE = {"map_augment": "mapping.augment", "map_layer0": "mapping.hidden", "map_layer1": "mapping.out"}
_ENDS = {("enc", "conv"): "conv_in", ("dec", "aux_norm"): "norm_out", ("dec", "aux_conv"): "conv_out"}
_MIDDLE = ("in0", "in1")


def _place(side: str, layer: str, seen: dict[str, list[str]]) -> str:
    """Where layer `layer`, as "16x16_block2", of the encoder or the decoder is here; layers come in their order."""
    kind = layer.split("_", 1)[1]
    if (side, kind) in _ENDS:
        return _ENDS[side, kind]
    group = "middle" if kind in _MIDDLE else {"enc": "down", "dec": "up"}[side]
    layers = seen.setdefault(group, [])
    if layer not in layers:
        layers.append(layer)
    return f"{group}.{layers.index(layer)}"


def from_py_meanflow(state: Mapping[str, Tensor], network: str = "net_ema1") -> dict[str, Tensor]:
    """One network of a py-meanflow checkpoint, for `SongUNet(3, 32, augment_dim=6).load_state_dict`.

    Args:
        state: the checkpoint's entry "model", with its keys in their order.
        network: `net`, or an average of it: `net_ema`, `net_ema1`, `net_ema2` with decays 0.9999, 0.99995, 0.9996.

    Returns:
        The same tensors under other names.

    Raises:
        ConfigError: if there is no such network, or it is another kind of network.

    """
    own: dict[str, Tensor] = {}
    seen: dict[str, list[str]] = {}
    for name, tensor in state.items():
        prefix, _, weight = name.partition(".")
        if prefix == network and not weight.endswith("resample_filter"):  # a constant here
            *parts, leaf = weight.split(".")
            try:
                if parts[0] in _WHOLE:
                    place = [_WHOLE[parts[0]]]
                else:
                    place = [_place(parts[0], parts[1], seen), *(_BLOCK[part] for part in parts[2:])]
            except (IndexError, KeyError):
                raise ConfigError(
                    f"the checkpoint has {weight}, expected the names of py-meanflow's SongUNet"
                ) from None
            own[".".join([*place, leaf])] = tensor
    if not own:
        found = sorted({name.split(".")[0] for name in state})
        raise ConfigError(f"the checkpoint has {', '.join(found)}, expected {network}; name one of its networks")
    return own


AVERAGES = ("net_ema", "net_ema1", "net_ema2", "net")


def first_average(state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """The network of a py-meanflow checkpoint that its own sampling takes, for a run's network.

    A network without augmentation labels does without the layer of those labels, which sampling does not use.

    Raises:
        ConfigError: as `from_py_meanflow`, or if the network is no `SongUNet`.

    """
    if not isinstance(network, SongUNet):
        raise ConfigError(f"weights of py-meanflow for a {type(network).__name__}, expected model=song_unet")
    name = next(each for each in AVERAGES if any(key.startswith(f"{each}.") for key in state))
    own = from_py_meanflow(state, name)
    if network.mapping.augment is None and own.pop("mapping.augment.weight", None) is not None:
        note(f"{name} without the layer of augmentation labels, as data.augment=0")
    return own
