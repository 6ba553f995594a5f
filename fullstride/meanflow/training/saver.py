"""The checkpoints during a run: written, thinned out, and restored after harmful steps."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fullstride.errors import PeerError
from fullstride.meanflow.checkpoints.folder import keep_newest, newest_whole, open_run, read_manifest, remove_later
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.training.state import RunState
from fullstride.runs.atomic_files import note


@dataclass
class CheckpointSaver:
    """Saves a run's state in its folder and restores it; of several processes only the first writes.

    Attributes:
        config: the run's configuration.
        state: the run's state.
        run: the run's folder.
        resume_advice: instructions for a person to continue a stopped run.
        returns: number of restored checkpoints since the last save.
        newest: newest checkpoint of this run.
        newest_step: its step.

    """

    config: TrainConfig
    state: RunState
    run: Path
    resume_advice: str
    returns: int = 0
    newest: Path | None = None
    newest_step: int = 0

    @classmethod
    def opened(cls, config: TrainConfig, state: RunState, resume_advice: str) -> "CheckpointSaver":
        """Make the run's folder, or go on from its newest whole checkpoint if the configuration says so.

        Raises:
            ConfigError: as `open_run`, or for a checkpoint of other settings or data.

        """
        run, checkpoint = state.processes.led(lambda: open_run(config))
        if checkpoint is not None:
            state.restore(checkpoint, config)
        if config.resume and state.processes.leads:
            start = checkpoint or f"no checkpoint in {run} yet, starting at step 0"
            changed = ""
            if checkpoint and (before := read_manifest(checkpoint)["config"]["epochs"]) != config.epochs:
                cosine = (
                    ", and the cosine schedule is stretched to end there" if config.optimizer.decay == "cosine" else ""
                )
                changed = f"; epochs: {before} -> {config.epochs}{cosine}"
                if state.position.epoch >= config.epochs:
                    changed = f"; epochs={config.epochs} are done already, nothing to train"
            Console().print(f"resume=true: {start}{changed}", soft_wrap=True, markup=False)
        return cls(config, state, run, resume_advice, newest=checkpoint, newest_step=state.position.step)

    @property
    def unsaved(self) -> str:
        """Steps that would be lost if the run ended now, in words."""
        steps = self.state.position.step - self.newest_step
        since = f"after {self.newest}" if self.newest else "so far, as there is no checkpoint yet"
        return f"unsaved: {steps} step{'s' if steps != 1 else ''} {since}"

    def save(self, *, must: bool) -> Path | None:
        """Write a checkpoint, one to return to; what a full disk refuses is tried again later, unless it must be.

        Raises:
            OSError: if it must be written and cannot, saying which checkpoint there is.

        """
        if (harmful := self.state.guard.tensors["skipped_in_a_row"].item()) and not must:
            self.note(f"not saved at step {self.state.position.step}: the last {harmful} steps were harmful")
            return None
        try:
            saved = self.state.save(self.run / "checkpoints", self.config)
        except (OSError, PeerError) as error:
            if must:
                newest = newest_whole(self.run)
                kept = f"{newest} is intact: free space, then {self.resume_advice}"
                advice = kept if newest else "free space and start again"
                raise OSError(f"cannot save step {self.state.position.step} ({error}); {advice}") from error
            self.note(f"not saved at step {self.state.position.step} ({error}); training continues")
            return None
        self._newest_is(saved)
        if harmful:
            # The good ones before it stay, whatever their number.
            self.note(f"{saved} was saved after harmful steps ({harmful} in a row): its weights may be bad")
            return saved
        self.state.processes.led(lambda: keep_newest(self.run, self.config.keep, saved))
        self.returns = 0
        return saved

    def go_back(self) -> Path:
        """Return to the newest good checkpoint, with other random numbers and another order from there on.

        Raises:
            FloatingPointError: if there is none, or the run came back to it too often.

        """
        step, limit = self.state.position.step, self.config.guard.max_skips
        trouble = f"{limit} steps in a row were not finite before step {step}"
        advice = "lower optimizer.lr, or set optimizer.grad_clip=1"
        checkpoint = self.state.processes.led(lambda: newest_whole(self.run, good=True))
        if checkpoint is None:
            raise FloatingPointError(f"{trouble}, and there is no checkpoint to return to; {advice}")
        if self.returns == self.config.guard.max_rollbacks:
            raise FloatingPointError(f"{trouble}, {self.returns} times after {checkpoint}, which stays; {advice}")
        attempt, self.returns = self.state.position.attempt + 1, self.returns + 1
        self.state.restore(checkpoint, self.config)
        self._newest_is(checkpoint)
        # Saved by a stop among the harmful steps.
        self.state.processes.led(lambda: remove_later(self.run, checkpoint))
        self.state.position.attempt = attempt
        self.state.reseed(self.config.seed)
        self.state.guard.forget_skips()
        self.note(f"{trouble}; went back to {checkpoint}, continuing with other random numbers")
        return checkpoint

    def _newest_is(self, checkpoint: Path) -> None:
        self.newest, self.newest_step = checkpoint, self.state.position.step

    def note(self, message: str) -> None:
        """Print a message, on the first process only."""
        if self.state.processes.leads:
            note(message)
