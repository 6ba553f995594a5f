"""Weights of improved MeanFlow, held against its published forward pass written out in plain fp64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.start import read_start, start_from
from fullstride.meanflow.config.networks import MiTConfig
from fullstride.meanflow.models.dit import DiT
from fullstride.meanflow.models.import_mit import from_imf
from fullstride.meanflow.models.mit import MiT
from fullstride.meanflow.training.build import build_model

CHANNELS, SIDE, PATCH, WIDTH, DEPTH, HEADS, HEAD_BLOCKS, CLASSES = 3, 6, 2, 24, 3, 3, 2, 5
HIDDEN = int(WIDTH * 8 / 3)
MODEL = MiTConfig(width=WIDTH, depth=DEPTH, heads=HEADS, head_blocks=HEAD_BLOCKS, class_conditional=True)
EMBEDDED = {"class": 8, "omega": 4, "t_min": 2, "t_max": 2, "time": 4}
EMBEDDERS = {"omega": "omega", "t_min": "cfg_t_start", "t_max": "cfg_t_end", "time": "h"}
State = dict[str, Tensor]


def official(seed: int) -> State:
    """Random weights under the names of imfDiT, without their wrapper."""
    shapes: dict[str, tuple[int, ...]] = {"x_embedder.proj.weight": (WIDTH, CHANNELS, PATCH, PATCH)}
    shapes |= {"x_embedder.proj.bias": (WIDTH,), "y_embedder.embedding_table.weight": (CLASSES + 1, WIDTH)}
    shapes |= {f"{name}_tokens": (count, WIDTH) for name, count in EMBEDDED.items()}
    for name in EMBEDDERS.values():
        for place, features in ((0, 256), (2, WIDTH)):
            shapes |= {f"{name}_embedder.mlp.{place}.weight": (WIDTH, features)}
            shapes |= {f"{name}_embedder.mlp.{place}.bias": (WIDTH,)}
    counts = {"shared_blocks": DEPTH - HEAD_BLOCKS, "u_heads": HEAD_BLOCKS, "v_heads": HEAD_BLOCKS}
    for block in (f"{group}.{i}" for group, count in counts.items() for i in range(count)):
        shapes |= {f"{block}.attn.{part}_proj.weight": (WIDTH, WIDTH) for part in ("q", "k", "v", "out")}
        shapes |= {f"{block}.attn.{part}_norm.weight": (WIDTH // HEADS,) for part in "qk"}
        shapes |= {f"{block}.{name}": (WIDTH,) for name in ("norm1.weight", "norm2.weight", "attn_scale", "mlp_scale")}
        shapes |= {f"{block}.mlp.w{i}.weight": (HIDDEN, WIDTH) for i in (1, 3)}
        shapes |= {f"{block}.mlp.w2.weight": (WIDTH, HIDDEN)}
    for head in "uv":
        shapes |= {f"{head}_final_layer.norm.weight": (WIDTH,)}
        shapes |= {f"{head}_final_layer.linear.weight": (CHANNELS * PATCH**2, WIDTH)}
        shapes |= {f"{head}_final_layer.linear.bias": (CHANNELS * PATCH**2,)}
    g = torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor) -> Tensor:
    """Neighbouring features of (b, heads, n, d) as complex numbers, turned by their place."""
    n, d = x.shape[2:]
    angle = torch.arange(n).double()[:, None] * 10_000.0 ** (-torch.arange(0, d, 2).double() / d)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def published(w: State, x: Tensor, given: State) -> tuple[Tensor, Tensor]:
    """u and v of arXiv:2512.02012 with its tokens in context."""

    def embedded(name: str, number: Tensor) -> Tensor:
        angle = number[:, None] * 10_000.0 ** (-torch.arange(128).double() / 128)
        h = torch.cat([angle.cos(), angle.sin()], 1) @ w[f"{name}.mlp.0.weight"].T + w[f"{name}.mlp.0.bias"]
        return F.silu(h) @ w[f"{name}.mlp.2.weight"].T + w[f"{name}.mlp.2.bias"]

    def block(name: str, x: Tensor) -> Tensor:
        y = rms(x, w[f"{name}.norm1.weight"])
        q, k, v = (
            (y @ w[f"{name}.attn.{part}_proj.weight"].T).unflatten(2, (HEADS, -1)).transpose(1, 2) for part in "qkv"
        )
        q, k = (turned(rms(y, w[f"{name}.attn.{part}_norm.weight"])) for part, y in (("q", q), ("k", k)))
        mixed = torch.softmax(q @ k.mT / math.sqrt(WIDTH / HEADS), -1) @ v
        x = x + mixed.transpose(1, 2).flatten(2) @ w[f"{name}.attn.out_proj.weight"].T * w[f"{name}.attn_scale"]
        y = rms(x, w[f"{name}.norm2.weight"])
        y = F.silu(y @ w[f"{name}.mlp.w1.weight"].T) * (y @ w[f"{name}.mlp.w3.weight"].T)
        return x + y @ w[f"{name}.mlp.w2.weight"].T * w[f"{name}.mlp_scale"]

    def head(name: str, x: Tensor) -> Tensor:
        for i in range(HEAD_BLOCKS):
            x = block(f"{name}_heads.{i}", x)
        x = rms(x[:, sum(EMBEDDED.values()) :], w[f"{name}_final_layer.norm.weight"])
        x = x @ w[f"{name}_final_layer.linear.weight"].T + w[f"{name}_final_layer.linear.bias"]
        side = SIDE // PATCH
        return torch.einsum("nhwpqc->nchpwq", x.unflatten(2, (PATCH, PATCH, -1)).unflatten(1, (side, side))).reshape(
            len(x), CHANNELS, SIDE, SIDE
        )

    numbers = {"omega": 1 - 1 / given["omega"], "t_min": given["start"], "t_max": given["end"], "time": given["gap"]}
    front = [w["class_tokens"] + w["y_embedder.embedding_table.weight"][given["label"]][:, None]]
    front += [w[f"{k}_tokens"] + embedded(f"{EMBEDDERS[k]}_embedder", numbers[k])[:, None] for k in EMBEDDERS]
    tokens = F.conv2d(x, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=PATCH)
    h = torch.cat([*front, tokens.flatten(2).mT], 1)
    for i in range(DEPTH - HEAD_BLOCKS):
        h = block(f"shared_blocks.{i}", h)
    return head("u", h), head("v", h)


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, State]:
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(4, CHANNELS, SIDE, SIDE, generator=g, dtype=torch.float64)
    t, r, omega, start, end = torch.rand(5, 4, generator=g, dtype=torch.float64)
    given = {
        "omega": 1 + 4 * omega,
        "start": start / 2,
        "end": 0.5 + end / 2,
        "label": torch.tensor([0, 3, CLASSES, 1]),
    }
    return z, r * t, t, given


def test_converted_weights_are_the_published_network(seed):
    state, (z, r, t, given) = official(seed), inputs(seed)
    net = build_model(MODEL, (CHANNELS, SIDE, SIDE), CLASSES).double()
    wrapped = {
        f"net.{name.removesuffix('.weight')}._flax_linear.weight": x for name, x in state.items() if ".mlp.w" in name
    }
    wrapped |= {f"net.{name}": x for name, x in state.items() if ".mlp.w" not in name}
    net.load_state_dict(from_imf(wrapped, net))
    expected = torch.cat(published(state, z, given | {"gap": t - r}), 1)
    torch.testing.assert_close(net(z, r, t, **given, both=True), expected, rtol=1e-6, atol=1e-6)  # its places are fp32


def test_a_file_without_the_blocks_of_v_is_recognised_and_v_starts_as_u(seed, tmp_path, capfd):
    state = {f"net.{name}": x.float() for name, x in official(seed).items() if not name.startswith("v_heads")}
    torch.save(state, tmp_path / "iMF.pth")
    net = build_model(MODEL, (CHANNELS, SIDE, SIDE), 7)
    assert start_from(net, read_start(tmp_path / "iMF.pth"), MODEL) == ["label.weight starts anew for 7 classes"]
    z, r, t, given = inputs(seed)
    single = {k: x.float() if x.is_floating_point() else x for k, x in given.items()}
    u, v = net(z.float(), r.float(), t.float(), **single, both=True).chunk(2, 1)
    assert torch.equal(u, v)
    assert u.abs().max() > 0.1
    said = capfd.readouterr().err
    assert "no blocks for v" in said
    assert "mean 0 and deviation 1 in each channel" in said


def test_other_networks_and_weights_are_refused(seed):
    with pytest.raises(ConfigError, match="weights of iMF for a DiT, expected a MiT"):
        from_imf(official(seed), DiT(CHANNELS, SIDE, width=24, depth=1, heads=3))
    state = official(seed)
    del state["omega_tokens"]
    with pytest.raises(ConfigError, match="no omega_tokens in the weights"):
        from_imf(state, MiT(CHANNELS, SIDE, width=24, depth=DEPTH, heads=3, head_blocks=2, num_classes=CLASSES))
