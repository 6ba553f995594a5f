"""Tiny random models of other libraries, trained by hand and by `TrainStep`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.step.torch.foreign.loops import STEPS, Case, by_hand, by_step, chosen, made

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokens(length: int = 9, vocabulary: int = 23) -> list[dict[str, Tensor]]:
    return [{"input_ids": x, "labels": x} for x in torch.randint(vocabulary, (STEPS, 4, length))]


def transformer(kind: str, config: str, batches: Any = tokens, **options: Any) -> Case:
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, config)(**SMALL | {"vocab_size": 23} | options)
    model = getattr(transformers, kind)(made).train()
    given = batches()

    def others() -> Any:
        return [(b.attention_scaling, b.inv_freq) for b in model.modules() if hasattr(b, "inv_freq")]

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(lambda model, batch: model(**batch).loss, model, optimizer, given, others)


def growing() -> list[dict[str, Tensor]]:
    """Longer than what the model was trained on, and then shorter again."""
    lengths = [6, 20, 28, 9, 20, 5]
    return [{"input_ids": x, "labels": x} for x in (torch.randint(23, (3, n)) for n in lengths)]


def llama_dynamic() -> Case:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return transformer(
        "LlamaForCausalLM",
        "LlamaConfig",
        growing,
        max_position_embeddings=16,
        rope_parameters=rope,
        num_key_value_heads=1,
    )


def bert() -> Case:
    return transformer("BertForMaskedLM", "BertConfig", hidden_dropout_prob=0.1)


def gpt2() -> Case:
    return transformer("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2, n_positions=32)


def t5() -> Case:
    size = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return transformer("T5ForConditionalGeneration", "T5Config", decoder_start_token_id=0, **size)


def vit() -> Case:
    images = lambda: [  # noqa: E731
        {"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.randint(2, (4,))} for _ in range(STEPS)
    ]
    return transformer("ViTForImageClassification", "ViTConfig", images, image_size=8, patch_size=4)


def lora() -> Case:
    peft = pytest.importorskip("peft")
    case = gpt2()
    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(case.model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    return case._replace(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-2))


def of_timm(name: str, **options: Any) -> Case:
    timm = pytest.importorskip("timm", exc_type=ImportError)
    model = timm.create_model(name, num_classes=5, **options).train()
    batches = [{"x": torch.randn(4, 3, 32, 32), "y": torch.randint(5, (4,))} for _ in range(STEPS // 2)]
    loss = lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"])  # noqa: E731
    return Case(loss, model, torch.optim.SGD(model.parameters(), lr=0.05), batches)


def timm_vit() -> Case:
    return of_timm("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=2, drop_path_rate=0.1)


def distilled() -> Case:
    """A student of a teacher in train mode, whose batch norms move too."""
    student, teacher = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5)) for _ in "st"
    )
    images = [{"x": torch.randn(4, 3, 8, 8)} for _ in range(STEPS)]
    kl = lambda a, b: nn.functional.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")  # noqa: E731
    loss = lambda model, batch: kl(model(batch["x"]), teacher(batch["x"]).detach())  # noqa: E731
    return Case(loss, student, torch.optim.SGD(student.parameters(), lr=0.1), images, teacher.state_dict)


def recurrent() -> Case:
    """Truncated backpropagation through time: the state is carried from one step to the next."""
    model = nn.ModuleDict({"lstm": nn.LSTM(4, 6, batch_first=True), "head": nn.Linear(6, 4)})
    carried: list[Any] = [None]

    def loss(model: Any, batch: Any) -> Tensor:
        out, state = model["lstm"](batch["x"], carried[0])
        carried[0] = tuple(x.detach() for x in state)
        return (model["head"](out) - batch["x"].roll(-1, 1)).square().mean()

    batches = [{"x": torch.randn(3, 7, 4)} for _ in range(STEPS)]
    return Case(loss, model, torch.optim.Adam(model.parameters()), batches, lambda: carried)


def adversarial() -> Case:
    """A critic under spectral norm, with a penalty on its gradient."""
    norm = nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(norm(nn.Linear(4, 8)), nn.Tanh(), norm(nn.Linear(8, 1)))

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        real = batch["x"].requires_grad_()
        score = model(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        return score.mean() - model(batch["z"]).mean() + slope.square().sum(1).mean(), {"slope": float(len(slope))}

    batches = [{"x": torch.randn(5, 4), "z": torch.randn(5, 4)} for _ in range(STEPS)]
    return Case(loss, model, torch.optim.RMSprop(model.parameters(), lr=1e-3), batches)


MODELS = {
    f.__name__: f for f in (llama_dynamic, bert, gpt2, t5, vit, lora, timm_vit, distilled, recurrent, adversarial)
}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of transformers, by peft
@chosen(MODELS, ("llama_dynamic", "bert", "lora", "timm_vit", "distilled", "recurrent", "adversarial"))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_eager_steps_are_those_of_a_loop_by_hand_to_the_last_bit(case, precision):
    expected = by_hand(made(case, 0), precision)
    found, step = by_step(made(case, 0), precision=precision)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert bool(step.errors) == (precision == "bf16")


# Of the others the compiler itself cannot make one graph.
@chosen({f.__name__: f for f in (distilled, bert, vit, timm_vit)}, ("distilled",))
def test_compiled_steps_are_those_of_a_loop_by_hand_to_rounding(case):
    expected = by_hand(made(case, 1))
    found, step = by_step(made(case, 1), backend="compile")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert step.errors
