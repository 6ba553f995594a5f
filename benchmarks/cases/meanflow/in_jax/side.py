"""JAX's side of `meanflow-jax`: `fullstride.step.jax.TrainStep` of the loss and the networks beside this file."""

from typing import Any

import jax
import numpy as np
import optax

from benchmarks.cases.meanflow.framework_worker import ADAMW, FrameworkJob, Gradients
from benchmarks.cases.meanflow.in_jax.loss import JaxLoss, network_of
from fullstride.meanflow.config.presets import MODELS
from fullstride.step.jax import TrainStep

# Of fp32 products: JAX's default rounds their factors to TF32 on a GPU, which PyTorch's tf32 and bf16 do, too.
PRODUCTS = {"fp32": "highest", "tf32": "default", "bf16": "default"}


class JaxSide:
    """Step of the network in Equinox with PyTorch's weights."""

    def __init__(self, job: FrameworkJob, batch: dict[str, np.ndarray]):
        """Take over the weights, and put the batch on the device in NHWC."""
        self.precision, self.config = PRODUCTS[job.options.precision], MODELS[job.options.model]()
        with np.load(job.folder / "weights.npz") as file:
            self.arrays = dict(file)
        dtype = "bfloat16" if job.options.precision == "bf16" else "float32"
        network = network_of(self.config, self.arrays, dtype)
        self.batch = jax.device_put({k: a if a.ndim == 1 else a.transpose(0, 2, 3, 1) for k, a in batch.items()})
        loss = JaxLoss(job.count, job.weighting_power, job.weighting_eps, job.attention)
        rate, b1, b2, eps = (ADAMW[name] for name in ("rate", "beta1", "beta2", "eps"))
        optimizer = optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=0.0)
        self.train_step = TrainStep(loss, optimizer, network)
        self.state = self.train_step.init()
        self.report: Any = None

    def step(self) -> None:
        """Dispatch a step."""
        with jax.default_matmul_precision(self.precision):
            self.report = self.report or self.train_step.compile(self.batch)
            self.state, _ = self.train_step(self.state, self.batch)

    def wait(self) -> None:
        """Wait for the device."""
        self.train_step.finish()
        jax.block_until_ready(self.state.buffers)

    def found(self, right: Gradients) -> tuple[float, list[np.ndarray], list[np.ndarray]]:
        """Return the last loss, AdamW's average of the gradients, and the right gradients in the same order."""
        averages = jax.tree.leaves(self.state.opt_state[0].mu)
        expected = jax.tree.leaves(network_of(self.config, {**self.arrays, **right}))
        loss = float(self.train_step.finish()["loss"])
        return loss, [np.asarray(x) for x in averages], [np.asarray(x) for x in expected]

    def peak_bytes(self) -> int | None:
        """Arguments, results and temporaries, as XLA has planned them; None on a CPU, as for PyTorch."""
        return None if jax.default_backend() == "cpu" else self.report.peak_bytes

    def notes(self) -> dict[str, Any]:
        """Return how long tracing and compiling took, XLA's count of operations, and its allocator's peak."""
        stats = jax.local_devices()[0].memory_stats() or {}
        return {
            "trace_s": self.report.trace_s,
            "compile_s": self.report.compile_s,
            "xla_flops": self.report.flops,
            "allocator_peak_bytes": stats.get("peak_bytes_in_use"),
        }
