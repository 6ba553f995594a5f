"""Networks as samplers run them: as they are, or each evaluation as one launch, recorded in a CUDA graph."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.derivative import Velocity
from fullstride.precision import formats
from fullstride.recording import CudaGraph, dense, on

BACKENDS = ("auto", "eager", "graph")
# Evaluations before the one that is recorded: kernels compile, libraries choose their algorithms and take their memory.
WARM = 2
Given = tuple[Tensor, Tensor, Tensor, Tensor | None]


def check_backend(name: str, device: torch.device, key: str = "backend") -> None:
    """Check that a network can be run so, before it is.

    Raises:
        ConfigError: for an unknown name, or a CUDA graph on another device, naming the setting `key`.

    """
    one_of(key, name, BACKENDS)
    if name == "graph" and device.type != "cuda":
        raise ConfigError(f"{key}=graph: CUDA graphs are CUDA's, the device is {device.type}; use eager or auto")


def run_by(name: str, network: Velocity, device: torch.device) -> Velocity:
    """The network as a backend runs it: eager, graph, or auto, which is graph on CUDA and eager elsewhere."""
    check_backend(name, device)
    recorded = name == "graph" or (name == "auto" and device.type == "cuda")
    return Recorded(network) if recorded else network


class Recorded(nn.Module):
    """u(z, r, t) without gradients as one launch: recorded after `WARM` evaluations, and replayed from then on.

    That is done for the shapes and number formats that come first; others, such as those of a last, smaller batch, run
    as they are, and so does a network in training mode or under gradients. A record reads the weights where they lie:
    what is written into them counts, tensors put in their place do not. It keeps the memory of an evaluation.
    """

    def __init__(self, network: Velocity, record: Any = CudaGraph):
        """Take a network on a CUDA device, called as `network(z, r, t, label=label)`; `record` makes the records."""
        super().__init__()
        self.network, self._record = network, record
        self.training = isinstance(network, nn.Module) and network.training
        self._form: Any = None
        self._warm = 0
        self._stream: torch.cuda.Stream | None = None
        self._inputs: Given | None = None
        self._graph: Any = None

    def forward(
        self,
        z: Float[Tensor, "b c h w"],
        r: Float[Tensor, " b"],
        t: Float[Tensor, " b"],
        label: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b c h w"]:
        """The network's value, in memory that is the caller's.

        Raises:
            ConfigError: for a network that cannot be recorded.

        """
        if self.training or torch.is_grad_enabled():
            return self.network(z, r, t, label=label)
        given = dense((z, r, t, label))
        form = formats(z.device), *(x if x is None else (x.shape, x.stride(), x.dtype) for x in given)
        if self._form not in (None, form):
            return self._run(given)
        self._form = form
        if self._warm < WARM:
            self._warm += 1
            return self._beside(given)
        if self._graph is None:
            self._capture(given)
        return self._replay(given)

    def _run(self, given: Given) -> Tensor:
        z, r, t, label = given
        return self.network(z, r, t, label=label)

    def _beside(self, given: Given) -> Tensor:
        """On the stream of the record, so that what libraries keep a stream is there."""
        if self._stream is None and given[0].is_cuda:
            self._stream = torch.cuda.Stream(given[0].device)
        with on(self._stream):
            return self._run(given)

    def _capture(self, given: Given) -> None:
        z, r, t, label = given
        self._inputs = inputs = z.clone(), r.clone(), t.clone(), None if label is None else label.clone()
        try:
            with on(self._stream):
                self._graph = self._record(lambda: self._run(inputs), None)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"backend=graph: the network cannot be recorded ({reason}), expected one that never waits for the "
                "device; use backend=eager"
            ) from error

    def _replay(self, given: Given) -> Tensor:
        assert self._inputs is not None
        for kept, new in zip(self._inputs, given, strict=True):
            if kept is not None and new is not None:
                kept.copy_(new, non_blocking=True)
        return self._graph.replay().clone()
