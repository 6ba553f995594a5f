"""Tiny models of other libraries, with random weights, and points for their derivatives."""

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IMAGES, TOKENS = (2, 3, 16, 16), (2, 5, 16)


@dataclass(frozen=True)
class Model:
    """Recipe of a model, and its call on tensors."""

    library: str
    make: Callable[[Any], nn.Module]
    call: Callable[[nn.Module, Tensor], Tensor]
    shape: tuple[int, ...]
    quick: bool = False  # of the selection that always runs


def last(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).last_hidden_state


def embedded(model: nn.Module, x: Tensor) -> Tensor:
    return model(inputs_embeds=x, use_cache=False).last_hidden_state


def encoded(model: nn.Module, x: Tensor) -> Tensor:
    return model(inputs_embeds=x).last_hidden_state


def denoised(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, torch.full((len(x),), 0.3, dtype=x.dtype)).sample


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def _vision(name: str, **options: Any) -> Callable[[Any], nn.Module]:
    settings = {"image_size": 16, "patch_size": 4, **SIZES}
    return lambda t: getattr(t, f"{name}Model")(getattr(t, f"{name}Config")(**settings), **options)


def _text(name: str, **options: Any) -> Callable[[Any], nn.Module]:
    settings = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **SIZES, **options}
    return lambda t: getattr(t, f"{name}Model")(getattr(t, f"{name}Config")(**settings))


def _t5(t: Any) -> nn.Module:
    return t.T5EncoderModel(t.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2))


def _gpt2(t: Any) -> nn.Module:
    tokens = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    return t.GPT2Model(t.GPT2Config(n_embd=16, n_layer=2, n_head=2, **tokens))


def _unet(d: Any) -> nn.Module:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": 8, "layers_per_block": 1}
    return d.UNet2DModel(sample_size=16, **blocks, **sizes)


def _dit(d: Any) -> nn.Module:
    return d.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, num_layers=2, sample_size=16, norm_num_groups=1
    )


def _classed(model: nn.Module, x: Tensor) -> Tensor:
    labels, time = torch.arange(len(x)), torch.full((len(x),), 3)
    return model(x, timestep=time, class_labels=labels).sample


def _flux(d: Any) -> nn.Module:
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    return d.FluxTransformer2DModel(
        patch_size=1, in_channels=4, joint_attention_dim=12, pooled_projection_dim=12, axes_dims_rope=(4, 4, 8), **sizes
    )


def _text_like(x: Tensor) -> Tensor:
    text = torch.linspace(-1, 1, 60, dtype=x.dtype, device=x.device)
    return text.view(1, 5, 12).expand(len(x), -1, -1)


def _with_a_text(model: nn.Module, x: Tensor) -> Tensor:
    text, where = _text_like(x), torch.arange(21, dtype=x.dtype, device=x.device).view(7, 3)
    return model(
        hidden_states=x,
        encoder_hidden_states=text,
        pooled_projections=text[:, 0],
        timestep=x.new_full((len(x),), 0.3),
        img_ids=where,
        txt_ids=x.new_zeros(5, 3),
    ).sample


def _sd3(d: Any) -> nn.Module:
    sizes = {"num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "patch_size": 2, "sample_size": 8}
    text = {"joint_attention_dim": 12, "caption_projection_dim": 16, "pooled_projection_dim": 12}
    channels = {"in_channels": 4, "out_channels": 4, "pos_embed_max_size": 8, "dual_attention_layers": (0,)}
    return d.SD3Transformer2DModel(**sizes, **text, **channels, qk_norm="rms_norm")


def _of_a_text(model: nn.Module, x: Tensor) -> Tensor:
    text = _text_like(x)
    return model(
        hidden_states=x,
        encoder_hidden_states=text,
        pooled_projections=text[:, 0],
        timestep=x.new_full((len(x),), 0.3),
    ).sample


def _attending(name: str, **options: Any) -> Callable[[Any], nn.Module]:
    """A transformer of diffusers that attends to a text."""
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "in_channels": 4, "sample_size": 8}
    return lambda d: getattr(d, name)(**heads, **options)


def _at_a_time(model: nn.Module, x: Tensor) -> Tensor:
    conditions = {"resolution": None, "aspect_ratio": None}
    more = {"added_cond_kwargs": conditions} if hasattr(model, "adaln_single") else {}
    time = torch.full((len(x),), 3, device=x.device)
    return model(x, encoder_hidden_states=_text_like(x), timestep=time, **more).sample


def _timm(name: str, **options: Any) -> Callable[[Any], nn.Module]:
    return lambda t: t.create_model(name, num_classes=5, **options)


VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}


SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (1, 2), "num_heads": (2, 2)}


def _lora(p: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    config = p.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return p.get_peft_model(_text("Llama", num_key_value_heads=1)(transformers), config)


def _torch(kind: str) -> Callable[[Any], nn.Module]:
    layer: dict[str, Any] = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
    made = {
        "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2),
        "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer), 2),
        "images": lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.Mish(),
            nn.InstanceNorm2d(8),
            nn.ConvTranspose2d(8, 4, 2),
            nn.PReLU(),
        ),
        "recurrent": lambda: nn.Sequential(nn.LayerNorm(16), nn.GRU(16, 16, batch_first=True)),
    }
    return lambda _: made[kind]()


CROSS = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8}
MODELS = {
    "torch TransformerEncoder": Model("torch", _torch("encoder"), plain, TOKENS, quick=True),
    "torch TransformerDecoder": Model("torch", _torch("decoder"), lambda m, x: m(x, x.sin()), TOKENS),
    "torch images": Model("torch", _torch("images"), plain, IMAGES, quick=True),
    "torch GRU": Model("torch", _torch("recurrent"), lambda m, x: m(x)[0], TOKENS),
    "ViT": Model("transformers", _vision("ViT", add_pooling_layer=False), last, IMAGES, quick=True),
    "Dinov2": Model("transformers", _vision("Dinov2"), last, IMAGES),
    "SigLIP": Model("transformers", _vision("SiglipVision"), last, IMAGES),
    "CLIP": Model("transformers", _vision("CLIPVision"), last, IMAGES),
    "BERT": Model("transformers", _text("Bert"), encoded, TOKENS),
    "Llama": Model("transformers", _text("Llama", num_key_value_heads=1), embedded, TOKENS, quick=True),
    "Qwen2": Model("transformers", _text("Qwen2", num_key_value_heads=1), embedded, TOKENS),
    "Qwen3": Model("transformers", _text("Qwen3", num_key_value_heads=1, head_dim=8), embedded, TOKENS),
    "Mistral": Model("transformers", _text("Mistral", num_key_value_heads=1, sliding_window=3), embedded, TOKENS),
    "GPT-2": Model("transformers", _gpt2, embedded, TOKENS),
    "T5": Model("transformers", _t5, encoded, TOKENS, quick=True),
    "UNet2DModel": Model("diffusers", _unet, denoised, IMAGES),
    "DiT": Model("diffusers", _dit, _classed, IMAGES),
    "Flux": Model("diffusers", _flux, _with_a_text, (2, 7, 4)),
    "SD3": Model("diffusers", _sd3, _of_a_text, (2, 4, 8, 6)),
    "PixArt": Model(
        "diffusers",
        _attending("PixArtTransformer2DModel", cross_attention_dim=16, caption_channels=12, norm_num_groups=4),
        _at_a_time,
        (2, 4, 8, 8),
    ),
    "Sana": Model(
        "diffusers",
        _attending("SanaTransformer2DModel", out_channels=4, cross_attention_dim=16, caption_channels=12, **CROSS),
        _at_a_time,
        (2, 4, 8, 8),
    ),
    "timm ViT": Model("timm", _timm("vit_tiny_patch16_224", **VIT), plain, IMAGES),
    "timm BEiT": Model("timm", _timm("beit_base_patch16_224", **VIT, use_rel_pos_bias=True), plain, IMAGES),
    "timm ResNet": Model("timm", _timm("resnet10t"), plain, (2, 3, 32, 32)),
    "timm ConvNeXt": Model(
        "timm", _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), plain, (2, 3, 32, 32)
    ),
    "timm Swin": Model("timm", _timm("swin_tiny_patch4_window7_224", **SWIN), plain, (2, 3, 32, 32)),
    "timm Swin v2": Model("timm", _timm("swinv2_tiny_window8_256", **SWIN), plain, (2, 3, 32, 32)),
    "timm EVA-02": Model("timm", _timm("eva02_tiny_patch14_224", **VIT), plain, IMAGES),
    "timm XCiT": Model(
        "timm", _timm("xcit_nano_12_p16_224", img_size=32, depth=2, embed_dim=16, num_heads=2), plain, (2, 3, 32, 32)
    ),
    "timm RegNet": Model("timm", _timm("regnety_002"), plain, (2, 3, 32, 32)),
    "LoRA of Llama": Model("peft", _lora, embedded, TOKENS),
}


class _Named(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Absent(types.ModuleType):
    """A module of torchvision, any of whose names is an empty class, and any of that one's names a string."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


PARTS = (
    "",
    ".transforms",
    ".transforms.functional",
    ".transforms.v2",
    ".datasets",
    ".datasets.folder",
    ".ops",
    ".ops.misc",
)


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Let timm be imported where torchvision cannot be: its models need none of it, its data loading does."""
    try:
        importlib.import_module("torchvision")
        yield
        return
    except (ImportError, RuntimeError):
        pass
    names = [f"torchvision{part}" for part in PARTS]
    for name in names:
        module = _Absent(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        if "." in name:
            parent, _, own = name.rpartition(".")
            setattr(sys.modules[parent], own, module)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def library(name: str) -> Any:
    """Import the library, or skip the test with the reason."""
    if name != "timm":
        return pytest.importorskip(name)
    with without_torchvision():
        return pytest.importorskip(name)


def random_model(name: str, seed: int) -> nn.Module:
    """Return the model in fp64 and eval mode, with random parameters and running statistics."""
    torch.manual_seed(seed)
    model = MODELS[name].make(library(MODELS[name].library)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.requires_grad_().copy_(0.2 * torch.randn_like(p))
        for key, buffer in model.named_buffers():
            if key.endswith("running_var"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model
