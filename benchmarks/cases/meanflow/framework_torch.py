"""PyTorch's side of `meanflow-jax`: `TrainStep` by its fastest backend."""

from typing import Any

import numpy as np
import torch

from benchmarks.cases.meanflow.framework_worker import ADAMW, FrameworkJob, Gradients
from benchmarks.cases.meanflow.options import PEER_BACKENDS
from benchmarks.cases.meanflow.step_setup import make_setup
from fullstride.step.torch import TrainStep, constant


class TorchSide:
    """Step of fullstride's loss and network."""

    def __init__(self, job: FrameworkJob, batch: dict[str, np.ndarray]):
        """Build the network, which has the weights that the reference is of, and put the batch on the device."""
        self.setup = make_setup(job.options, job.known)
        model, device = self.setup.model, self.setup.device
        weighting = {"weighting_power": job.weighting_power, "weighting_eps": job.weighting_eps}
        loss = self.setup.loss(job.ratio, split=job.split, **weighting)
        self.batch = {name: torch.from_numpy(array).to(device) for name, array in batch.items()}
        self.batch |= {name: self.setup.ordered(self.batch[name]) for name in ("x", "e")}
        betas = ADAMW["beta1"], ADAMW["beta2"]
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=ADAMW["rate"], betas=betas, eps=ADAMW["eps"], weight_decay=0.0, fused=True
        )
        self.train_step = TrainStep(
            lambda model, drawn: loss.at(model, **drawn)[0],
            model,
            self.optimizer,
            schedule=constant,
            precision=job.options.precision,
            backend=PEER_BACKENDS[device.type],
            check_first_step=False,
        )
        self.loss: Any = None

    def step(self) -> None:
        """Dispatch a step."""
        compiled = self.loss is not None
        self.loss = self.train_step(self.batch)["loss"]
        if not compiled:
            self.wait()
            self.setup.clock.reset_peak()  # the compiler's search for kernels is no part of a step

    def wait(self) -> None:
        """Wait for the device."""
        if self.setup.device.type == "cuda":
            torch.cuda.synchronize(self.setup.device)

    def found(self, right: Gradients) -> tuple[float, list[np.ndarray], list[np.ndarray]]:
        """Return the last loss, AdamW's average of the gradients, and the right gradients in the same order."""
        named = dict(self.setup.model.named_parameters())
        averages = [self.optimizer.state[p]["exp_avg"].cpu().numpy() for p in named.values()]
        return self.loss.item(), averages, [right[name] for name in named]

    def peak_bytes(self) -> int | None:
        """Peak of all tensors since the first step, capture included; None on a CPU."""
        return self.setup.clock.peak_bytes()

    def notes(self) -> dict[str, Any]:
        """Return the backend."""
        return {"backend": self.train_step.backend}
