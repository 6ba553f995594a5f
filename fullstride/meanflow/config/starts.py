"""Forms of weights that a run can start from, by name: how each is recognised and converted."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_MODELS = "fullstride.meanflow.models"


@dataclass(frozen=True)
class FormRow:
    """A form of weights of another project.

    Attributes:
        convert: import path of a function of (tensors by name, network) that returns the network's tensors by name.
        marks: names of tensors that weights of this form have.
        settings: settings of a training that its file may have, as they must be; none other form has these.

    """

    convert: str
    marks: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)


_DIT_MARKS = ("x_embedder.proj.weight", "t_embedder.mlp.0.weight", "blocks.0.adaLN_modulation.1.weight")
FORMS: dict[str, FormRow] = {
    "sit": FormRow(f"{_MODELS}.import_dit:from_sit", _DIT_MARKS, {"path_type": "Linear", "prediction": "velocity"}),
    "dit": FormRow(f"{_MODELS}.import_dit:from_dit", _DIT_MARKS),
    "diffusers_dit": FormRow(
        f"{_MODELS}.import_dit:from_diffusers_dit",
        ("pos_embed.proj.weight", "transformer_blocks.0.norm1.linear.weight", "proj_out_2.weight"),
    ),
    "imf": FormRow(
        f"{_MODELS}.import_mit:from_imf",
        ("net.x_embedder.proj.weight", "net.omega_tokens", "net.u_final_layer.norm.weight"),
    ),
    "py_meanflow": FormRow(
        f"{_MODELS}.import_song_unet:first_average", ("net.map_layer0.weight", "net.map_layer1.weight")
    ),
}
AUTO, OWN = "auto", "fullstride"


def forms_of(names: Iterable[str]) -> list[str]:
    """The forms whose marks are among the names of tensors."""
    found = set(names)
    return [form for form, row in FORMS.items() if found.issuperset(row.marks)]
