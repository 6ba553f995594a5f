"""Networks as samplers run them: eager, or each evaluation as one launch, captured in a CUDA graph."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fullstride.device.cuda_graph import CudaGraph, copy_into, on_stream, static_input, without_gaps
from fullstride.device.precision import current_formats, uncached
from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.objective.derivative import Velocity, labelled
from fullstride.runs.atomic_files import note

SAMPLING_BACKENDS = ("auto", "eager", "graph")
# Evaluations before the one that is recorded: kernels compile, libraries choose algorithms and take their memory.
WARM = 2
Given = tuple[Tensor, Tensor, Tensor, Tensor | None]


def check_backend(name: str, device: torch.device, key: str = "backend") -> None:
    """Check that a network can be run so, before it is.

    Raises:
        ConfigError: for an unknown name, or a CUDA graph on another device, naming the setting `key`.

    """
    one_of(key, name, SAMPLING_BACKENDS)
    if name == "graph" and device.type != "cuda":
        raise ConfigError(f"{key}=graph: CUDA graphs are CUDA's, the device is {device.type}; use eager or auto")


def run_by(name: str, network: Velocity, device: torch.device) -> Velocity:
    """The network as a backend runs it.

    Args:
        name: eager; graph, whose evaluations are captured; or auto, which is graph on CUDA if possible.
        network: the network, as for `GraphedNetwork`.
        device: the network's device.

    Raises:
        ConfigError: as `check_backend`.

    """
    check_backend(name, device)
    recorded = name == "graph" or (name == "auto" and device.type == "cuda")
    return GraphedNetwork(network, required=name == "graph") if recorded else network


class GraphedNetwork(nn.Module):
    """u(z, r, t) without gradients as one launch: the third evaluation in a row of a form is captured, then replayed.

    A form is the shapes, the labels' presence and the number formats. Other forms run eagerly, such as a last, smaller
    batch, and replace the captured one after `WARM` evaluations in a row. A network in training mode or under gradients
    runs eagerly, too. A graph reads the weights in place: values written into them count, new tensors assigned to them
    do not. It keeps the memory of an evaluation, and is for one stream at a time.
    """

    def __init__(self, network: Velocity, record: Any = CudaGraph, required: bool = True):
        """Take a network.

        Args:
            network: on a CUDA device, called as `network(z, r, t)`, with `label=label` where labels are given.
            record: function that captures a graph.
            required: refuse a network that cannot be captured or does not fit; otherwise that is noted, and
                it runs as it is.

        """
        super().__init__()
        self.network, self._record, self._required = network, record, required
        self._given_up = False
        self._stream: torch.cuda.Stream | None = None
        self._recorded: Any = None  # the form of the captured graph
        self._inputs: Any = None
        self._graph: Any = None
        self._next: Any = None  # the form that came last, if it is another, and how often in a row
        self._met = 0

    def forward(
        self,
        z: Float[Tensor, "b *s"],
        r: Float[Tensor, " b"],
        t: Float[Tensor, " b"],
        label: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b *s"]:
        """The network's value, in memory that is the caller's.

        Raises:
            ConfigError: for a network that cannot be captured.
            torch.OutOfMemoryError: if its graph does not fit into memory.

        """
        if self._given_up or getattr(self.network, "training", False) or torch.is_grad_enabled():
            return self.network(z, r, t, **labelled(label))
        given = z, r, t, label
        form = current_formats(z.device), *(x if x is None else (x.shape, x.dtype) for x in given)
        if form == self._recorded:
            self._next = None
            return self._replay(given)
        if form != self._next:
            self._next, self._met = form, 0
        self._met += 1
        if self._met <= WARM or not self._capture(given):
            if self._stream is None and z.is_cuda:
                self._stream = torch.cuda.Stream(z.device)
            with on_stream(self._stream):  # that of the record, so that what libraries keep a stream is there
                return self._run(without_gaps(given))
        self._recorded, self._next = form, None
        return self._replay(given)

    def _run(self, given: Given) -> Tensor:
        z, r, t, label = given
        with uncached(z.device):
            return self.network(z, r, t, **labelled(label))

    def _capture(self, given: Given) -> bool:
        """Capture the evaluation in a CUDA graph; return whether there is a graph now."""
        self._recorded = self._graph = self._inputs = None  # their memory may be needed by the next graph
        # Tensors of inference mode could not be written into outside it.
        with torch.inference_mode(False), torch.no_grad():
            inputs = static_input(without_gaps(given))
            try:
                with on_stream(self._stream):
                    self._graph = self._record(lambda: self._run(inputs), None)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                if not self._required:
                    note(
                        "evaluations cannot be captured in a CUDA graph and run without one, which is slower "
                        f"({reason})"
                    )
                    self._given_up = True
                    return False
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise ConfigError(
                    f"the network cannot be captured in a CUDA graph ({reason}), expected one that never waits for the "
                    "device; sample with backend=eager, in a run with evaluation.backend=eager"
                ) from error
        self._inputs = inputs
        return True

    def _replay(self, given: Given) -> Tensor:
        copy_into(self._inputs, given)
        return self._graph.replay().clone()
