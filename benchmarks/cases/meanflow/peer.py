"""`python -m benchmarks meanflow-peer`: a whole training step compared with the official PyTorch code's.

Both make a recipe's steps from a first to a last on pictures that lie on the device: zeroed gradients, augmentation,
noise and times, the loss with its derivative, backward, optimizer, averages, learning rate. The official code
(github.com/Gsunshine/py-meanflow, a checkout of the user's) does so by its own loop and compiles its step as it does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.cases.meanflow.options import PEER_PRECISIONS, PeerOptions
from benchmarks.cases.meanflow.peer_codes import SHAPE, Ours, Theirs
from benchmarks.cases.meanflow.step_setup import weight_passes
from benchmarks.experiments.meanflow.official_code import check_network, check_settings, load_official
from benchmarks.harness.budget import NO_TIME, Budget, one_stream, reason, say
from benchmarks.harness.environment import environment, slug
from benchmarks.harness.results import CaseResult, Row, at
from benchmarks.harness.table import finish, result_table
from fullstride.device import memory
from fullstride.device.precision import check_precision, set_precision
from fullstride.device.select import resolve_device
from fullstride.errors import ConfigError
from fullstride.meanflow.config.overrides import compose
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.training.build import augment_dim, build_model
from fullstride.measure.flops import count_flops
from fullstride.measure.roofline import Ceilings, measure_ceilings, roofline_bound
from fullstride.measure.timing import Timing

READY = "py-meanflow, augmented before"


@dataclass
class PeerBench:
    """Measurement of one code after the other."""

    options: PeerOptions
    device: torch.device
    config: TrainConfig

    def __post_init__(self) -> None:
        self.rates: dict[str, Ceilings] = {}
        self.errors: dict[str, float] = {}
        self.left_out: list[dict[str, str]] = []
        self._budget = Budget.of(self.options.seconds)
        shape = build_model(self.config.model, SHAPE, 0, augment_dim=augment_dim(self.config.data))
        self.weights = sum(p.numel() for p in shape.parameters())
        one = torch.zeros(1, *SHAPE), torch.zeros(1), torch.ones(1)
        self._flops = count_flops(lambda: shape(*one))

    def ceilings(self, precision: str) -> Ceilings:
        """Rates of this machine in the format of that precision."""
        if precision not in self.rates:
            set_precision(precision, self.device)
            self.rates[precision] = measure_ceilings(self.device.type, "bfloat16" if precision == "bf16" else "float32")
        return self.rates[precision]

    def rows(self) -> Iterator[Row]:
        """Measure ours in the first precision, the official code, and ours in the others, as time permits."""
        first, *others = self.options.precisions
        yield from self._ours(first)
        yield from self._theirs()
        for precision in others:
            yield from self._ours(precision)

    def _ours(self, precision: str) -> Iterator[Row]:
        name = f"fullstride, {precision}"
        if self._spent(name):
            return
        rates = self.ceilings(precision)
        say(f"compiling and timing: {name}")
        config = replace(self.config, precision=precision)
        ours = Ours(config, self.device)
        yield self._row(name, ours.timing(self.options.steps), rates, precision)
        self.errors |= {f"{precision}, {form}": error for form, error in ours.errors.items()}
        ours.end()
        del ours
        memory.release(self.device)

    def _theirs(self) -> Iterator[Row]:
        if self._spent("py-meanflow"):
            return
        precision = "tf32" if self.device.type == "cuda" else "fp32"
        rates = self.ceilings(precision)
        say("compiling and timing: py-meanflow")
        theirs = Theirs(self.config, self.options.official, self.device)
        self.errors["py-meanflow's u and du/dt by our network"] = theirs.error_of_ours()
        yield self._row("py-meanflow", theirs.timing(self.options.steps), rates, precision)
        yield self._row(READY, theirs.timing(self.options.steps, ready=True), rates, precision)
        del theirs
        memory.release(self.device)

    def _spent(self, name: str) -> bool:
        if self._budget.spent:
            self.left_out.append({"name": name, "why": NO_TIME})
        return self._budget.spent

    def _row(self, name: str, timing: Timing, rates: Ceilings, precision: str) -> Row:
        config = self.config
        forwards = 3 + config.loss.meanflow_ratio  # see `python -m benchmarks meanflow-step`
        work = forwards * config.data.batch_size * self._flops
        moved = weight_passes(0) * 4 * self.weights
        extra = {"precision": precision, "TFLOP/s": rates.flops / 1e12, "forwards": forwards}
        return Row(name, timing, roofline_bound(work, moved, rates), extra)


def run(options: PeerOptions, out: Path) -> Path:
    """Check, measure, print the table and write the JSON; return its path.

    ConfigError if the device, a precision, a setting or the checkout cannot be used here. GateError, StepError if a
    step of ours is wrong, or our network with their weights is another one.
    """
    device = resolve_device(options.device)
    options = options.on(device.type)
    for precision in options.precisions:
        check_precision(precision, device)
    own = (f"backend={options.backend}", f"device={device}", f"precision={options.precisions[0]}")
    config, usual = (compose([*given.recipe, *own]) for given in (options, replace(options, settings=())))
    check_network(config)
    check_settings(config, usual)
    if config.data != replace(usual.data, batch_size=config.data.batch_size):
        raise ConfigError(
            "data=... or data.KEY=...: this benchmark uses random images of CIFAR-10's size; omit this setting"
        )
    load_official(options.official)  # before minutes are spent
    with one_stream(device):
        bench = PeerBench(options, device, config)
        rows, failed = list[Row](), None
        try:
            for row in bench.rows():
                rows.append(row)
        except Exception as error:  # what one breaks at is no reason to lose the rest
            failed = error
            bench.left_out.append({"name": "the rest", "why": reason(error)})
        ceilings = bench.ceilings(options.precisions[0])
    conditions = {
        "recipe": " ".join(options.recipe),
        "backend": options.backend,
        "batch_size": config.data.batch_size,
        "image_shape": list(SHAPE),
        "parameters": bench.weights,
        "steps": options.steps,
        **({"rows": slug(" ".join(options.settings))} if options.settings else {}),
        **at(precisions=(options.precisions, PEER_PRECISIONS[device.type]), steps=(options.steps, PeerOptions.steps)),
        "left_out": bench.left_out,
    }
    result = CaseResult("meanflow-peer", device.type, conditions, bench.errors, ceilings, rows, environment())
    return finish(result, out, lambda: [result_table(result)], width=110, failed=failed)
