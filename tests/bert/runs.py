"""Small runs: what they are told, how one is stopped, and what of their metrics a clock does not decide."""

import signal
from pathlib import Path

from rich.console import Console

from fullstride.bert.training.settings import TrainSettings, settings_of
from fullstride.bert.training.trainer import Trainer
from fullstride.runs.folder import read_metrics

# `model=tiny` of a size that compiles at once.
TINY = (16, 1, 2)
TIMED = {"seconds_per_step", "tokens_per_second", "host_ms", "total_ms", "hidden"}
QUIET = Console(quiet=True)


def settings(texts: Path, folder: Path, *more: str) -> TrainSettings:
    """Six steps with everything random switched on."""
    given = {
        "data": "text_files",
        "data.path": texts,
        "data.separator": "line",
        "data.vocab_size": 90,
        "data.length": 24,
        "data.batch_size": 6,
        "data.holdout": 0.2,
        "model.hidden_dropout": 0.1,
        "optimizer.warmup_steps": 2,
        "accumulate": 2,
        "ema": 0.5,
        "layout": "flat",
        "steps": 6,
        "save_every": 3,
        "eval_every": 3,
        "log_every": 1,
        "output_dir": folder,
        "run_name": "run",
    }
    given |= dict(pair.split("=", 1) for pair in more)
    return settings_of([f"{key}={value}" for key, value in given.items()])


def run(given: TrainSettings, stop_at: int = 0) -> Trainer:
    trainer = Trainer(given, QUIET)
    if stop_at:
        after = trainer._after_step

        def stopping() -> None:
            if trainer.state.step == stop_at:
                signal.raise_signal(signal.SIGTERM)
            after()

        trainer._after_step = stopping
    trainer.run_to_end()
    return trainer


def untimed(folder: Path, name: str = "run") -> list[dict]:
    return [{k: v for k, v in line.items() if k not in TIMED} for line in read_metrics(folder / name)]
