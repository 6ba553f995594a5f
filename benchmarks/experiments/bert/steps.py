"""Cost of calling BERT's step by the way of calling it, measured before the run of the BERT experiment."""

from typing import Any

import jax

from benchmarks.cases.bert.workload import flops
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.cases.step_jax.real import TOLERANCE, over, step_times
from benchmarks.cases.step_jax.workload import Workload
from benchmarks.harness.budget import Budget, say
from fullstride.bert.training.build import begin, data_for, model_of
from fullstride.bert.training.loss import mlm_loss
from fullstride.bert.training.optimizer import optimizer_of
from fullstride.bert.training.settings import TrainSettings
from fullstride.errors import ConfigError, one_of
from fullstride.step.jax.precision import precision_of

OURS = "TrainStep grouped"
WAYS = ("bare executable", OURS, "filter_jit", "filter_jit donated")
# Share of the minutes for evaluations, which are not part of the steps' time.
SPARE = 0.05
# Seconds, on top of the minutes, after which no way is compiled or timed any more; rounds that there are at least.
TIMED, ROUNDS = 150.0, 5


def overhead(model: str, settings: TrainSettings, minutes: float) -> dict[str, Any]:
    """Time the step's ways in milliseconds, relative to the bound; return the number of our steps that fit the minutes.

    ConfigError if the precision is not supported, or there was no time for our step.
    """
    one_of("precision", precision := settings.precision, TOLERANCE)
    workload, ceilings = _workload(model, settings), jax_ceilings(precision_of(precision).compute or "float32")
    floor = workload.floor(ceilings)
    times = step_times(workload, WAYS, precision, Budget.of(TIMED), ROUNDS)
    if OURS not in times:
        raise ConfigError(
            f"{model}: compiling took more than {TIMED:g} s, so {OURS} was not timed; run the command again"
        )
    bare = times[WAYS[0]]
    ways = {
        name: {
            "step ms": t.free.median_ms,
            "step ms, each waited for": t.blocked.median_ms,
            "over the bare executable": over(t.free.samples_ms, bare.free.samples_ms)["ratio"],
            "over the floor": floor.compare(t.free).ratio,
            "first call s": t.free.first_ms / 1e3,
        }
        for name, t in times.items()
    }
    fit = int(60e3 * minutes * (1 - SPARE) / ways[OURS]["step ms"])
    steps = max(fit, settings.optimizer.warmup_steps + 1)
    say(f"{model}: {ways[OURS]['step ms']:.2f} ms a step, {steps} steps")
    found = {"steps": steps, "minutes": minutes, "ways": ways}
    return found | {"ceilings": vars(ceilings), "floor": floor.to_dict()}


def _workload(model: str, settings: TrainSettings) -> Workload:
    """Return the step of the run, on its first batch."""
    begin(settings)
    texts, batches = data_for(settings)
    data, numbers = settings.data, precision_of(settings.precision)

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return mlm_loss(numbers.cast(model), batch, key)[0].value

    def fresh() -> Any:
        return model_of(settings.model, texts.train.vocabulary, data.length, settings.seed)

    return Workload(
        name=f"{model}, {settings.precision}, {data.batch_size} x {data.length}",
        model=fresh,
        loss_fn=loss_fn,
        optimizer=optimizer_of(settings.optimizer, settings.steps),
        batch=jax.device_put(batches.at(0)),
        key=jax.random.key(1, impl=settings.rng),
        flops=flops(fresh().config, data.batch_size, data.length, data.mask_fraction),
    )
