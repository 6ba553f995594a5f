"""Quality against time: fullstride and the official code train the same network by one recipe for the same time."""

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from benchmarks.experiments.meanflow.jobs import name_of
from benchmarks.experiments.meanflow.official import train_official
from benchmarks.experiments.meanflow.race_asked import LAST, RaceRequest
from benchmarks.experiments.meanflow.watch import TimeUp, Watch
from benchmarks.harness.budget import say
from benchmarks.harness.run_provenance import expect_here
from benchmarks.harness.time_limit import Limit
from fullstride.device.select import resolve_device
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.sampling.generate import load_generator
from fullstride.meanflow.training.trainer import Trainer
from fullstride.runs.folder import SAME_COMMAND
from fullstride.runs.lock import hold
from fullstride.step.torch import cosine_of, warmed_up
from fullstride.step.torch.schedules import Schedule

COMPILED = "compiled"


class WatchedTrainer(Trainer):
    """Trainer that a watch ends; its learning rate decays over the watch's time if it decays."""

    def __init__(self, config: TrainConfig, watch: Watch):
        self.watch, self._decays = watch, config.optimizer.decay == "cosine"
        # Of the time, as the next step has it, on the device.
        self._share = torch.zeros((), dtype=torch.float64, device=resolve_device(config.device))
        super().__init__(config, resume_advice=SAME_COMMAND)
        self.after_step.append(self._look_after_a_step)
        watch.stop = self.stop
        watch.go_on_from(self.state.position.step)
        self._look_at_the_clock()

    @property
    def progress(self) -> float:
        """Share of the time, of which there are fewer steps than the configuration has."""
        return self.watch.share

    def _rates(self) -> Schedule | None:
        if not self._decays:
            return super()._rates()
        return warmed_up(cosine_of(self._share), self.config.optimizer.warmup_steps)

    def _look_at_the_clock(self) -> None:
        if self._decays:
            self._share.fill_(self.watch.share)

    def _look_after_a_step(self) -> None:
        if self.watch.after_step(self.state.position.step, self._scored, lambda: self._save(must=True)):
            self._watch_steps()
        self._look_at_the_clock()

    def _scored(self) -> nn.Module:
        """Return the averaged network for scoring, during which the watchdog waits."""
        self.watchdog.wait_for("a mark", self.limits.evaluation)
        return self.state.ema.model

    def _save(self, *, must: bool) -> Path | None:
        self.watch.keep_clock(self.state.position.step)
        return super()._save(must=must)

    def _end_stopped(self, message: str = "") -> NoReturn:
        # A checkpoint of the start would let the next process compile less, and call that the start-up.
        starting = "" if self.watch.clock.running else "stopped during the start, nothing to save"
        super()._end_stopped(message or starting)


def train_ours(config: TrainConfig, watch: Watch) -> str:
    """Train until the watch ends it, and say why it did; ConfigError, FloatingPointError, OutOfMemory, Preempted,
    KeyboardInterrupt as of `Trainer.run_to_end`.
    """
    try:
        WatchedTrainer(config, watch).run_to_end()
    except TimeUp as over:
        return str(over)
    return "epochs are over before the time"


def run(code: str, seed: int, asked: RaceRequest, limit: Limit, official: Path | None) -> bool:
    """Train one run as far as the limit allows, or go on with it; score it at its marks and its end.

    Work that is not expected to fit the limit is not begun. Return whether the run is complete. ConfigError for
    settings, a device or a checkout that cannot be used, or a run begun on another machine, with other settings, or
    trained by another process now. Preempted or KeyboardInterrupt after saving, if a stop signal came.
    """
    asked.check(code, seed, official)
    config = asked.config(code, seed)
    device, run = resolve_device(config.device), Path(config.output_dir) / config.run_name
    run.mkdir(parents=True, exist_ok=True)
    hold(run)
    record, name = asked.record(code, seed), f"{code}, seed {seed}"
    if not asked.is_complete(code, seed):
        expect_here(asked.begun(), config.device)  # all of them: a result is of one kind of machine
    if record.trained:
        say(f"{name}: already trained")
        watch = Watch(config, record, limit, device)
    else:
        anew = asked.begins_anew(code, seed)
        if anew and (start := asked.start_of(code)) and not limit.fits(start):
            say(f"{name}: not begun; its start takes about {start:.0f} s, and --limit {limit.seconds:g} leaves less")
            return False
        if anew and (had := record.begin_anew()):
            say(f"{name}: its checkpoints are gone, so it starts again; its {had} marks are kept until it has as many")
        _compile_alone(run, anew)
        record.write()
        watch = Watch(config, record, limit, device)  # its clock counts the start-up, from here on
        if code == "official":
            assert official is not None
            why = train_official(config, official, watch)
        else:
            why = train_ours(config, watch)
        say(f"{name}: {why}")
    if record.trained and code != "official":
        hold(run)  # the trainer has let go of it at its end
        _score_last(code, seed, asked, watch)
    return asked.is_complete(code, seed)


def _score_last(code: str, seed: int, asked: RaceRequest, watch: Watch) -> None:
    """Score the other samplers of fullstride's last network, to compare with its single step, as time permits."""
    record = watch.record
    left = [sampler for sampler in LAST if name_of(sampler) not in record.values["final"]]
    if not left:
        return
    names = " and ".join(name_of(sampler) for sampler in left)
    if asked.begins_anew(code, seed):
        say(f"{record.path.parent}: {names} cannot be scored without checkpoints; delete this folder to train again")
        return
    generator = load_generator(record.path.parent, watch.config.device)
    for sampler in left:
        # One evaluation of the network a step.
        if not watch.limit.fits((sampler[1] or 0) * (watch.pace or 0.0)):
            say(f"{code}, seed {seed}: no time left for {name_of(sampler)}; run the same command to score it")
            return
        record.values["final"][name_of(sampler)] = watch.score(generator.model, sampler)
        record.write_work()


def _compile_alone(run: Path, anew: bool) -> None:
    """Compile into the run's own folder: kernels that another run compiled would shorten this one's start-up.

    Kernels that an earlier process of a restarted run compiled would do the same.
    """
    folder = run.absolute() / COMPILED
    blank = re.search(r"\s", str(folder))  # which C++ compilers reject: there it is a link to a temporary folder
    if anew or (blank and not folder.is_symlink()):
        shutil.rmtree(folder.resolve(), ignore_errors=True)
    if blank and not folder.exists():
        folder.unlink(missing_ok=True)
        folder.symlink_to(tempfile.mkdtemp(prefix="fullstride-"))
    folder = folder.resolve() if blank else folder
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
