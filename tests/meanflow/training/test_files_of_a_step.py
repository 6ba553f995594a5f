"""How many files of the package one eager step of a run goes through: who reads it has to open as many."""

import sys
from pathlib import Path
from types import FrameType

import fullstride
from fullstride.meanflow.config.presets import MODELS
from fullstride.meanflow.config.schema import DataConfig, GuardConfig, TrainConfig
from fullstride.meanflow.training.trainer import Trainer

PACKAGE = Path(fullstride.__file__).parent
APART = ("jvp/", "meanflow/models/")  # the derivative's rules and the network
WARM, STEPS = 14, 16  # the first ones compile kernels, compare, learn the shapes and are timed


class Entered:
    """Files of the package whose functions are called, in the order of the first call."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            name = path.relative_to(PACKAGE).as_posix()
            if not name.startswith(APART):
                self.files.setdefault(name, frame.f_code.co_qualname)

    def __str__(self) -> str:
        return "\n".join(f"{number}. {file}: {name}" for number, (file, name) in enumerate(self.files.items(), 1))


class Counted(Trainer):
    """A trainer that notes what a step goes through, and what all of a turn of its loop does."""

    def __init__(self, config: TrainConfig):
        super().__init__(config)
        self.in_step, self.in_turn = Entered(), Entered()

    def _step(self, raw, labels):
        if self.step.made < WARM:
            return super()._step(raw, labels)
        sys.setprofile(self.in_step if self.step.made == WARM else None)
        metrics = self.step({"raw": raw, "labels": labels})
        sys.setprofile(self.in_turn if self.step.made == WARM + 1 else None)
        return metrics


def test_a_step_goes_through_few_files(tmp_path):
    trainer = Counted(
        TrainConfig(
            data=DataConfig(batch_size=52),
            model=MODELS["unet_tiny"](channels=4),
            guard=GuardConfig(check_tangents=False),
            device="cpu",
            epochs=1,
            log_every=STEPS,
            run_name="run",
            output_dir=str(tmp_path),
        )
    )
    assert trainer.config.backend == "eager"
    assert trainer.steps == STEPS + 1
    try:
        trainer.run_to_end()
    finally:
        sys.setprofile(None)
    assert len(trainer.in_step.files) <= 14, f"from a batch to the averages:\n{trainer.in_step}"
    assert {"step/torch/body.py", "meanflow/objective/loss.py"} <= trainer.in_step.files.keys()
    turn = trainer.in_turn.files.keys() - trainer.in_step.files.keys()
    assert len(turn) <= 8, f"around it, from one step to the next:\n{trainer.in_turn}"
