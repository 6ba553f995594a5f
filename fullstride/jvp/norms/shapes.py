"""Shapes of the norms' arguments, for annotations: names of sizes agree within one signature."""

from jaxtyping import Float
from torch import Tensor

Rows = Float[Tensor, "*s d"]
Row = Float[Tensor, " d"]
Samples = Float[Tensor, "b *n d"]
Modulation = Float[Tensor, "b *one d"]  # (b, d) or (b, 1, d)
Image = Float[Tensor, "b c *s"]
First = Float[Tensor, "n c *s"]  # images of the first samples
SampleChannels = Float[Tensor, "b c"]
FirstChannels = Float[Tensor, "n c"]
GroupMoment = Float[Tensor, "b g"]
Channels = Float[Tensor, " c"]

Moments = tuple[Tensor, ...]  # mean, unless the norm keeps it, and rstd: one of each row or group
Gradients = tuple[Tensor | None, ...]
