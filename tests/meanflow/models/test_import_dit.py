"""Weights of SiT and DiT, held against the published forward pass written out in plain fp64, and against diffusers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.errors import ConfigError
from fullstride.meanflow.models.dit import DiT, position_embedding
from fullstride.meanflow.models.import_dit import from_diffusers_dit, from_dit, from_sit
from fullstride.meanflow.models.song_unet import SongUNet
from fullstride.meanflow.objective.derivative import velocity_and_derivative

CHANNELS, SIDE, PATCH, WIDTH, DEPTH, HEADS, CLASSES = 3, 6, 2, 24, 2, 3, 5
State = dict[str, Tensor]


def positions() -> Tensor:
    """Sines and cosines of column and row, as arXiv:2212.09748's code makes them."""
    count = WIDTH // 4
    wave = 10_000.0 ** (-torch.arange(count, dtype=torch.float64) / count)
    rows = []
    for row in range(SIDE // PATCH):
        for column in range(SIDE // PATCH):
            rows.append(
                torch.cat([(column * wave).sin(), (column * wave).cos(), (row * wave).sin(), (row * wave).cos()])
            )
    return torch.stack(rows)[None]


def official(generator: torch.Generator, halves: int) -> State:
    """Random weights under SiT's and DiT's names; `halves` is 2 if the last layer gives a variance, too."""
    shapes = {"x_embedder.proj": (WIDTH, CHANNELS, PATCH, PATCH), "t_embedder.mlp.0": (WIDTH, 256)}
    shapes |= {"t_embedder.mlp.2": (WIDTH, WIDTH), "final_layer.adaLN_modulation.1": (2 * WIDTH, WIDTH)}
    shapes |= {"final_layer.linear": (halves * CHANNELS * PATCH**2, WIDTH)}
    layers = {
        "attn.qkv": (3, 1),
        "attn.proj": (1, 1),
        "mlp.fc1": (4, 1),
        "mlp.fc2": (1, 4),
        "adaLN_modulation.1": (6, 1),
    }
    for block in range(DEPTH):
        shapes |= {f"blocks.{block}.{name}": (a * WIDTH, b * WIDTH) for name, (a, b) in layers.items()}

    def normal(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    state = {f"{name}.weight": normal(*shape) for name, shape in shapes.items()}
    state |= {f"{name}.bias": normal(shape[0]) for name, shape in shapes.items()}
    return state | {"y_embedder.embedding_table.weight": normal(CLASSES + 1, WIDTH), "pos_embed": positions()}


def published(state: State, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
    """The forward pass of arXiv:2212.09748, figure 3, without the learned variance."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        norm = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return norm * (1 + scale[:, None]) + shift[:, None]

    angle = t[:, None] * torch.exp(-math.log(10_000) * torch.arange(128, dtype=torch.float64) / 128)
    embedded = linear("t_embedder.mlp.0", torch.cat([angle.cos(), angle.sin()], 1))
    c = linear("t_embedder.mlp.2", F.silu(embedded)) + state["y_embedder.embedding_table.weight"][label]
    tokens = F.conv2d(x, state["x_embedder.proj.weight"], state["x_embedder.proj.bias"], stride=PATCH)
    h = tokens.flatten(2).mT + state["pos_embed"]
    for i in range(DEPTH):
        shift1, scale1, gate1, shift2, scale2, gate2 = linear(f"blocks.{i}.adaLN_modulation.1", F.silu(c)).chunk(6, 1)
        qkv = linear(f"blocks.{i}.attn.qkv", modulated(h, shift1, scale1)).unflatten(2, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.mT / math.sqrt(WIDTH / HEADS), -1) @ v
        h = h + gate1[:, None] * linear(f"blocks.{i}.attn.proj", mixed.transpose(1, 2).flatten(2))
        hidden = F.gelu(linear(f"blocks.{i}.mlp.fc1", modulated(h, shift2, scale2)), approximate="tanh")
        h = h + gate2[:, None] * linear(f"blocks.{i}.mlp.fc2", hidden)
    out = linear("final_layer.linear", modulated(h, *linear("final_layer.adaLN_modulation.1", F.silu(c)).chunk(2, 1)))
    side = SIDE // PATCH
    return torch.einsum("nhwpqc->nchpwq", out.reshape(len(x), side, side, PATCH, PATCH, -1)).reshape(
        len(x), -1, SIDE, SIDE
    )[:, :CHANNELS]


def ours(classes: int = CLASSES, **keys) -> DiT:
    sizes = {"patch_size": PATCH, "width": WIDTH, "depth": DEPTH, "heads": HEADS, "num_classes": classes}
    net = DiT(CHANNELS, SIDE, **sizes, **keys).double().eval()
    net.position = position_embedding(SIDE // PATCH, WIDTH)  # which a network keeps in its weights' first format
    return net


def points(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z = torch.randn(4, CHANNELS, SIDE, SIDE, generator=generator, dtype=torch.float64)
    t = torch.rand(4, generator=generator, dtype=torch.float64)
    r = t * torch.rand(4, generator=generator, dtype=torch.float64)
    return z, r, t, torch.randint(CLASSES, (4,), generator=generator)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("halves", [1, 2])
def test_sit_becomes_the_velocity_from_noise_at_1_to_data_at_0(halves, seed):
    g = torch.Generator().manual_seed(seed)
    state, (z, r, t, label) = official(g, halves), points(g)
    net = ours()
    net.load_state_dict(from_sit(state, net))
    expected = -published(state, z, 1 - t, label)
    assert expected.abs().mean() > 0.1
    close(net(z, t, t, label), expected)
    close(net(z, r, t, label), expected)  # alike for every r
    v = torch.randn_like(z)
    _, derivative = velocity_and_derivative(net, z, r, t, v, {"label": label})
    step = 1e-5
    ends = [-published(state, z + s * v, 1 - t - s, label) for s in (step, -step)]
    torch.testing.assert_close(derivative, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-6)


def test_no_class_of_sit_is_no_label_here_and_all_of_a_network_without_classes(seed, capfd):
    g = torch.Generator().manual_seed(seed)
    state, (z, r, t, _) = official(g, 1), points(g)
    expected = -published(state, z, 1 - t, torch.full((4,), CLASSES))
    for net in (ours(), ours(classes=0)):
        net.load_state_dict(from_sit(state, net))
        close(net(z, r, t), expected)
    assert "'no class' is part of the network without classes" in capfd.readouterr().err


def test_dit_is_the_noise_at_its_step(seed, capfd):
    g = torch.Generator().manual_seed(seed)
    state, (z, r, _, label) = official(g, 2), points(g)
    step = torch.tensor([3.0, 500.0, 999.0, 20.0], dtype=torch.float64)
    net = ours(time_scale=1000.0)
    net.load_state_dict(from_dit(state, net))
    close(net(z, r, step / 1000, label), published(state, z, step, label))
    told = capfd.readouterr().err
    assert "predicts noise" in told
    assert "variance" in told


def test_diffusers_dit_is_its_output(seed):
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_layers": DEPTH, "sample_size": SIDE, "patch_size": PATCH, "num_embeds_ada_norm": CLASSES}
    sizes |= {"num_attention_heads": HEADS, "attention_head_dim": WIDTH // HEADS, "in_channels": CHANNELS}
    theirs = diffusers.DiTTransformer2DModel(out_channels=2 * CHANNELS, norm_eps=1e-6, **sizes).double().eval()
    g = torch.Generator().manual_seed(seed)
    for p in theirs.parameters():
        p.data.normal_(0, 0.2, generator=g)
    net = ours(time_scale=1000.0)
    with pytest.raises(ConfigError, match="differs from block 0's"):
        from_diffusers_dit(theirs.state_dict(), net)
    first = theirs.transformer_blocks[0].norm1.emb
    for block in theirs.transformer_blocks:
        block.norm1.emb.load_state_dict(first.state_dict())
        block.norm1.emb.time_proj.downscale_freq_shift = 0  # DiT's own frequencies
    net.load_state_dict(from_diffusers_dit(theirs.state_dict(), net))
    z, r, _, label = points(g)
    step = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64)  # its waves are in fp32
    expected = theirs(z, step, label).sample[:, :CHANNELS]
    torch.testing.assert_close(net(z, r, step / 1000, label), expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_right_is_refused(seed):
    g = torch.Generator().manual_seed(seed)
    state = official(g, 1)
    with pytest.raises(ConfigError, match="SiT for a SongUNet, expected a DiT"):
        from_sit(state, SongUNet(3, 8, channels=8, channel_mult=(1,), num_blocks=1, attention_resolutions=()))
    with pytest.raises(ConfigError, match="model.time_scale=1, expected 1000"):
        from_dit(state, ours())
    with pytest.raises(ConfigError, match="fixed sines and cosines"):
        from_sit(state | {"pos_embed": state["pos_embed"] + 0.01}, ours())
    with pytest.raises(ConfigError, match=r"pos_embed has shape \(1, 4, 24\)"):
        from_sit(state | {"pos_embed": state["pos_embed"][:, :4]}, ours())
