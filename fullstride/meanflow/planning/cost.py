"""The cost model of a captured step on one GPU, and of the processes' all-reduce; imports no framework.

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
        flops: rate of a large matrix product in the step's number format.
        bytes: rate of a large copy, bytes read plus written.

    """

    flops: float
    bytes: float


@dataclass(frozen=True)
class Costs:
    """Fitted factors: the time of each kind of work over its time at the machine's measured rates.

    Attributes:
        convolution: factor of operations, by precision.
        product: factor of matrix products' operations, in each precision.
        attention: factor of operations.
        moved: factor of the bytes of norms and of saved activations.
        call_us: fixed time of every call of a pass, in microseconds.
        tangent: factor of a tangent's pass over a third of flow matching's step, by precision.
        written: factor of uncompiled pointwise operations, 4 bytes a number; a compiled step has them in `moved`.
        kept: share of the bytes saved by eager operations that a step holds, by precision.

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
        parameters: number of trained parameters.
        convolution, product, attention: operations an image, 2 a multiply-add; a product is a matrix product.
        moved: bytes per image that norms read and write, and that are saved for the backward pass.
        kept: bytes per image saved for the backward pass.
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
        ratio: share of the samples in the JVP.
        precision: fp32, tf32 or bf16.
        backend: compile+graph or graph.
        whole: whether optimizer and averages belong to it.
        averages: number of averages of the weights.
        period: steps between the averages' updates.
        accumulate: number of forward passes of a step.
        guidance: further forward passes without gradient, in units of the batch.

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
        work: the work of the network.
        step: the step.
        rates: rates of the machine in the step's precision.
        costs: fitted factors.

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
        parameters: number of the network's parameters.
        gpus: number of GPUs of the ring.
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
