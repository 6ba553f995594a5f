"""The cost model of a recorded step on one GPU, and of the processes' sums; imports no framework.

A step's device time is the sum of what its kinds of work take: each kind's operations or bytes at the machine's own
measured rates, times a factor that was fitted to measured steps (`fit.py`), plus a fixed time for every call. Nothing
overlaps in the model. With F a forward pass, a step takes 3F, and the tangent one F more for its share of the samples.
"""

from dataclasses import dataclass

from fullstride.errors import ConfigError, one_of

PRECISIONS: tuple[str, ...] = ("bf16", "tf32", "fp32")
CAPTURED_BACKENDS = ("compile+graph", "graph")
# Attention has two products forward and five backward; with its tangent six forward.
ATTENTION_STEP, ATTENTION_TANGENT = 3.5, 2.0
# Fused AdamW reads weight, gradient and two moments and writes three of them; the norm and the reset of gradients.
OPTIMIZER_BYTES = 36


@dataclass(frozen=True)
class Rates:
    """Measured rates of a machine: operations and bytes a second.

    Attributes:
        flops: of a large matrix product in the step's number format.
        bytes: of a large copy, read plus written.

    """

    flops: float
    bytes: float


@dataclass(frozen=True)
class Costs:
    """Fitted: how many times as long as at the machine's own rates each kind of work takes.

    Attributes:
        convolution: by precision, of operations.
        product: of matrix products' operations, in each precision.
        attention: of operations.
        moved: of the bytes of norms and of what is kept.
        call_us: of every call of a pass, in microseconds, whatever it does.
        tangent: by precision, of a tangent's pass beside a third of flow matching's step.
        written: of pointwise operations as they are written, 4 bytes a number; a compiled step has them in `moved`.
        kept: by precision, what a step holds of the bytes that eager operations keep.

    """

    convolution: dict[str, float]
    product: float
    attention: float
    moved: float
    call_us: float
    tangent: dict[str, float]
    written: float
    kept: dict[str, float]


@dataclass(frozen=True)
class NetworkWork:
    """A network's forward pass.

    Attributes:
        parameters: numbers that are trained.
        convolution, product, attention: operations an image, 2 a multiply-add; a product is a matrix product.
        moved: bytes an image that norms read and write, and that are kept for the backward pass.
        kept: the latter alone.
        pointwise: numbers an image that other operations read and write.
        calls: convolutions, products, attentions and norms, each at least a kernel.

    """

    parameters: int
    convolution: float
    product: float
    attention: float
    moved: float
    kept: float
    pointwise: float
    calls: int

    @property
    def flops(self) -> float:
        """Operations of an image's forward pass."""
        return self.convolution + self.product + self.attention


@dataclass(frozen=True)
class PlannedStep:
    """A step as it is run.

    Attributes:
        batch: samples of a forward pass on one GPU.
        ratio: share of them in the JVP.
        precision: fp32, tf32 or bf16.
        backend: compile+graph or graph.
        whole: whether optimizer and averages belong to it.
        averages: of the weights.
        period: steps between the averages' updates.
        accumulate: forward passes of a step.
        guidance: samples of further forward passes without gradient, in units of the batch.

    """

    batch: int
    ratio: float = 0.0
    precision: str = "bf16"
    backend: str = "compile+graph"
    whole: bool = False
    averages: int = 0
    period: int = 1
    accumulate: int = 1
    guidance: float = 0.0

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            ConfigError: for a precision or backend that no plan is made of.

        """
        one_of("precision", self.precision, PRECISIONS)
        if self.backend not in CAPTURED_BACKENDS:
            raise ConfigError(
                f"backend={self.backend}: expected one of {', '.join(CAPTURED_BACKENDS)}; a step without CUDA graph "
                "waits for the host, and host time varies too much to predict"
            )


def parts(work: NetworkWork, step: PlannedStep, rates: Rates, costs: Costs) -> dict[str, float]:
    """Milliseconds of one optimizer step on one GPU, by kind of work.

    Args:
        work: of the network.
        step: how it is run.
        rates: of the machine in the step's precision.
        costs: fitted.

    """
    ms_flop, ms_byte = 1e3 / rates.flops, 1e3 / rates.bytes
    passes = 3 + costs.tangent[step.precision] * step.ratio + step.guidance
    samples = step.batch * step.accumulate
    attended = ATTENTION_STEP + ATTENTION_TANGENT * step.ratio + step.guidance
    written = 4 * work.pointwise * ms_byte * costs.written if step.backend == "graph" else 0.0
    rounds = step.accumulate * (3 + (step.ratio > 0) + (step.guidance > 0))
    found = {
        "convolutions": samples * passes * work.convolution * ms_flop * costs.convolution[step.precision],
        "matrix products": samples * passes * work.product * ms_flop * costs.product,
        "attention": samples * attended * work.attention * ms_flop * costs.attention,
        "norms and memory": samples * passes * (work.moved * ms_byte * costs.moved + written),
        "calls": rounds * work.calls * costs.call_us / 1e3,
    }
    if step.precision == "bf16":  # weights cast to 16 bits, gradients back to 32
        found["casts of weights"] = step.accumulate * 12 * work.parameters * ms_byte
    if step.whole:
        moved = OPTIMIZER_BYTES + 4 * (1 + 2 * step.averages) / step.period * (step.averages > 0)
        found["optimizer and averages"] = moved * work.parameters * ms_byte
    return found


def step_ms(work: NetworkWork, step: PlannedStep, rates: Rates, costs: Costs) -> float:
    """Milliseconds of one optimizer step on one GPU."""
    return sum(parts(work, step, rates, costs).values())


def memory_bytes(work: NetworkWork, step: PlannedStep, costs: Costs) -> float:
    """Most bytes alive in a step: weights, their 16-bit copies, activations; in a whole one what else is kept."""
    copies = 4 + 2 * (step.precision == "bf16")
    if step.whole:
        copies += 4 + 8 + 4 * step.averages  # gradients, two moments, averages
    return copies * work.parameters + step.batch * work.kept * costs.kept[step.precision]


def all_reduce_ms(parameters: int, gpus: int, link: float) -> float:
    """Milliseconds that a ring takes to sum fp32 gradients: 2 (n - 1) / n of their bytes through each GPU's link.

    Args:
        parameters: of the network.
        gpus: of the ring.
        link: bytes a second that a GPU sends and receives at once.

    """
    return 2 * (gpus - 1) / gpus * 4 * parameters / link * 1e3


# Seconds of each unit, longest first.
UNITS = {"d": 86_400.0, "h": 3_600.0, "min": 60.0, "s": 1.0}


def duration(seconds: float) -> str:
    """A time to three digits in the longest unit of which it is one at least, as in `8.00 min`, or in seconds."""
    unit = next((unit for unit, length in UNITS.items() if seconds >= length), "s")
    value = seconds / UNITS[unit]
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} {unit}"
