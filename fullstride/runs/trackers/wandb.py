"""Weights & Biases, through its own client."""

import importlib

from fullstride.runs.trackers.tracked_run import TrackedRun


class WandB:
    """track=wandb: a run of Weights & Biases, whose files lie in `wandb` of the run's folder.

    `WANDB_MODE=offline` keeps it on this machine until `wandb sync`; its other variables count, too. Its client sends
    from a process of its own. A resumed run goes on under its identifier; a second value of a step is left out.
    """

    def __init__(self, run: TrackedRun):
        """Start the run, or, if it has made steps before, go on with it."""
        wandb = importlib.import_module("wandb")
        identifier = run.known_as("wandb")
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            config=run.config,
            dir=str(run.folder),
            id=identifier,
            resume="allow" if identifier else None,
        )
        run.remember("wandb", self._run.id)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record the values."""
        self._run.log(values, step=step)

    def close(self, state: str = "finished") -> None:
        """Wait until everything is written or sent; a failed run is shown as one."""
        self._run.finish(exit_code=int(state == "failed"))
