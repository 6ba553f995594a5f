"""`python -m benchmarks meanflow-sampling`: what images cost, by sampler, batch and how the network is run.

A row is one batch, from noise on the device to images on the device, or a set of images from (seed, index) to the host,
as `meanflow sample` makes it. The floor is the arithmetic of the network's evaluations, or reading its weights for each
of them. The network has random weights; what images show does not change what they cost.
"""

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from benchmarks.cases.meanflow.options import SamplingOptions, StepOptions
from benchmarks.cases.meanflow.sampling_run import Bench
from benchmarks.cases.meanflow.step_setup import Setup, make_setup
from benchmarks.harness.budget import NO_MEMORY, NO_TIME
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, at
from benchmarks.harness.table import finish, result_table
from fullstride.device.select import resolve_device
from fullstride.meanflow.sampling.graphed import check_backend

WIDTH = 150  # of the table


def run(options: SamplingOptions, out: Path) -> Path:
    """Gate, measure, print the table and write the JSON, whose path is returned.

    Raises:
        ConfigError: if the device is not there or cannot take the precision or a backend, or nothing was measured.
        GateError: if images are wrong or cannot be made; the rest is measured and written before.

    """
    bench = Bench(_setup(options), options)
    bench.run()
    result = result_of(bench)

    def shown() -> Iterator[Table | str]:
        yield result_table(result)
        yield from (f"{row.name}: {row.extra['images_per_second']:,.0f} images/s" for row in bench.rows)
        yield from (f"left out: {name}: {why}" for name, why in bench.left_out.items())

    wrong = [f"{name}: {why}" for name, why in bench.left_out.items() if why not in (NO_MEMORY, NO_TIME)]
    return finish(result, out, shown, width=WIDTH, wrong=wrong)


def _setup(options: SamplingOptions) -> Setup:
    if any("graph" in name for name in options.backends):
        check_backend("graph", resolve_device(options.device), "--backend")
    shared = {"channels_last": options.channels_last, "seconds": options.seconds}
    setup = make_setup(StepOptions(options.device, options.precision, options.model, **shared))
    setup.model.eval()
    return setup


def result_of(bench: Bench) -> CaseResult:
    """What is written."""
    setup, options = bench.setup, bench.options
    conditions = {
        "model": options.model,
        "precision": options.precision,
        "backend": ",".join(bench.backends),
        "batches": list(bench.batches),
        "image_shape": list(setup.shape),
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        **({"memory_order": "channels_last"} if options.channels_last else {}),
        **at(batch=(options.batches, ())),
        "left_out": [{"name": name, "why": why} for name, why in bench.left_out.items()],
    }
    device = setup.device.type
    return CaseResult("meanflow-sampling", device, conditions, bench.errors, setup.ceilings, bench.rows, environment())
