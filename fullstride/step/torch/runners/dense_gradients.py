"""Inductor pass that makes the gradients of convolutions dense; imported with the compiler."""

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

BACKWARD = torch.ops.aten.convolution_backward.default


class DenseGradients(CustomGraphPass):
    """Inductor pass that copies the gradient of a convolution's result where it does not lie as the images do.

    The gradients of what `torch.cat` joins are parts of a wider image, as in a U-Net on its way up. PyTorch would copy
    such a gradient for each of its convolutions, and there once for the gradient of the image and once for that of the
    weight. A copy in the graph is made once, by the kernel that computes the gradient.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph in place."""
        copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}
        for node in graph.find_nodes(op="call_function", target=BACKWARD):
            gradient, image = (arg for arg in node.args[:2] if isinstance(arg, fx.Node))
            memory_format = _format(image.meta["val"])
            if memory_format is None or gradient.meta["val"].is_contiguous(memory_format=memory_format):
                continue
            if (gradient, memory_format) not in copies:
                with graph.inserting_before(node):
                    copies[gradient, memory_format] = _clone(graph, gradient, memory_format)
            node.replace_input_with(gradient, copies[gradient, memory_format])

    def uuid(self) -> bytes:
        """Return the key of cached compilations."""
        return get_hash_for_files((__file__,))


def _format(images: Tensor) -> torch.memory_format | None:
    """Return the order in which images lie without gaps; None if in none."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}
    formats = (torch.contiguous_format, channels_last.get(images.ndim, torch.contiguous_format))
    return next((each for each in formats if images.is_contiguous(memory_format=each)), None)


def _clone(graph: fx.Graph, x: fx.Node, memory_format: torch.memory_format) -> fx.Node:
    made = graph.call_function(torch.ops.aten.clone.default, (x,), {"memory_format": memory_format})
    made.meta["val"] = x.meta["val"].clone(memory_format=memory_format)
    return made
