"""Models within PyTorch's own wrappers, which average gradients over processes by themselves: DDP, FSDP, FSDP2."""

from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import nn

from fullstride.step.torch.metrics import Metrics, stacked, unstacked


def groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return the groups over which wrappers average a model's gradients, one for each dimension of their mesh."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    for module in model.modules():
        if isinstance(group := getattr(module, "process_group", None), dist.ProcessGroup) and not isinstance(
            module, nn.SyncBatchNorm
        ):
            return [group]
    meshes = (getattr(p, "device_mesh", None) for p in model.parameters())
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    return [] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]


def mean_over(groups: list[dist.ProcessGroup], values: Metrics) -> Metrics:
    """Return the means of scalars over groups; collective."""
    if not groups:
        return values
    means = stacked(values)
    for group in groups:
        dist.all_reduce(means, group=group)
        means /= group.size()
    return unstacked(means, {name: value.dtype for name, value in values.items()})


def unsynchronised(model: nn.Module) -> AbstractContextManager[None]:
    """The context of a pass whose gradients a later one completes, as DDP's `no_sync`."""
    return model.no_sync() if isinstance(model, nn.parallel.DistributedDataParallel) else nullcontext()
