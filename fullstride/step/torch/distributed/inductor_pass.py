"""Inductor pass that makes a compiled backward pass hand over gradients early; imported with the compiler."""

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from fullstride.step.torch.distributed import early_gradients as early


class MarkReady(CustomGraphPass):
    """Inductor pass that adds `ready` after each result of a backward graph; leaves other graphs alone."""

    def __call__(self, graph: fx.Graph) -> None:
        if not any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes):
            return
        results = list(graph.output_node().args[0])  # pyright: ignore[reportArgumentType]
        for number, result in enumerate(results):
            # One tensor for several parameters could not be told apart.
            if isinstance(result, fx.Node) and result.op == "call_function" and results.count(result) == 1:
                with graph.inserting_after(result):
                    graph.call_function(torch.ops.fullstride.ready.default, (result, number))

    def uuid(self) -> bytes:
        """Return the key of cached compilations."""
        return get_hash_for_files((__file__, early.__file__))
