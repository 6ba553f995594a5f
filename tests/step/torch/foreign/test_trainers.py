"""Loops of Lightning, accelerate and transformers' Trainer, and the same with `TrainStep` in place of their step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fullstride.errors import ConfigError
from fullstride.step.torch import Accumulation, TrainStep

STEPS = 6


class Samples(Dataset):
    """Sentences of tokens with labels that are partly ignored."""

    def __init__(self, count: int = 4 * STEPS):
        self.tokens = torch.randint(23, (count, 9))
        self.labels = self.tokens.masked_fill(torch.rand(count, 9) < torch.rand(count, 1), -100)
        self.labels[:, 1] = self.tokens[:, 1]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.labels[i]}


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=23, **size)).train()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def predicted(batch: Any) -> Tensor:
    """The tokens that a causal language model predicts."""
    return (batch["labels"][:, 1:] != -100).sum()


def of_lightning(by_step: bool, folder: Any) -> tuple[Any, int]:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = llama(), False

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 2 * STEPS)]

        def on_train_start(self) -> None:
            optimizer = self.optimizers().optimizer
            self.fast = TrainStep(loss, self.net, optimizer, clip=0.5, backend="eager") if by_step else None

        def training_step(self, batch: Any, _: int) -> None:
            if self.fast is not None:
                self.log_dict(self.fast(batch))
                self.zero_grad()  # so that the optimizer's step only counts
            else:
                self.zero_grad()
                self.manual_backward(loss(self.net, batch))
                nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
            self.optimizers().step()
            self.lr_schedulers().step()

    torch.manual_seed(0)
    module = Module()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", enable_model_summary=False, default_root_dir=folder, **options
    )
    trainer.fit(module, DataLoader(Samples(), batch_size=4))
    return module.net.state_dict(), trainer.global_step


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_lightnings_steps_are_those_of_its_manual_loop(tmp_path):
    found, expected = of_lightning(True, tmp_path), of_lightning(False, tmp_path)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found[1] == STEPS


def of_accelerate(by_step: bool) -> Any:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 2 * STEPS)
    loader = DataLoader(Samples(), batch_size=4 if by_step else 2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if by_step:
        step = TrainStep(loss, model, optimizer, clip=0.5, accumulate=2, backend="eager")
        for batch in loader:
            step(batch)
            schedule.step()
        return model.state_dict()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.state_dict()


def test_accelerates_steps_are_those_of_its_loop():
    torch.testing.assert_close(of_accelerate(True), of_accelerate(False), rtol=0, atol=0)


def test_an_optimizer_that_scales_the_loss_itself_is_refused():
    kind = pytest.importorskip("accelerate.optimizer").AcceleratedOptimizer
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = kind(torch.optim.SGD(model.parameters()), device_placement=False, scaler=scaler)
    with pytest.raises(ConfigError, match="AcceleratedOptimizer scales the loss by a scaler of its own"):
        TrainStep(loss, model, optimizer, scaler=scaler, backend="eager")


def of_trainer(by_step: bool, folder: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # which its Trainer needs

    class FastTrainer(transformers.Trainer):
        fast: Any = None

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            if self.fast is None:
                clip, parts = self.args.max_grad_norm, Accumulation(2, predicted)
                optimizer = self.optimizer.optimizer
                self.fast = TrainStep(loss, model, optimizer, clip=clip, accumulate=parts, backend="eager")
            model.train()
            metrics = self.fast(self._prepare_inputs(inputs))
            model.zero_grad()  # so that the Trainer's own step changes nothing
            return metrics["loss"]

    torch.manual_seed(0)
    model, samples = llama(), Samples()
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4 if by_step else 2,
        gradient_accumulation_steps=1 if by_step else 2,
        num_train_epochs=1,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    kind = FastTrainer if by_step else transformers.Trainer
    trainer = kind(model=model, args=arguments, train_dataset=samples)
    trainer.train()
    assert trainer.state.global_step == STEPS
    return model.state_dict()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_trainers_steps_are_its_own_weighted_by_tokens(tmp_path):
    torch.testing.assert_close(of_trainer(True, tmp_path), of_trainer(False, tmp_path), rtol=1e-4, atol=1e-5)
