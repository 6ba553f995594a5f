"""The optimizers by name: where each is made, and which settings exclude each other."""

from fullstride.settings.fields import Conflict

OPTIMIZERS: dict[str, str] = {
    "adamw": "fullstride.meanflow.training.optimizers:adamw",
    "muon": "fullstride.meanflow.training.optimizers:muon",
}
MOMENTUM = 0.95
CONFLICTS = (
    Conflict(
        "optimizer.momentum optimizer",
        lambda c: c.optimizer.momentum != MOMENTUM and c.optimizer.name != "muon",
        "optimizer=muon, which alone has it; optimizer.beta1 is AdamW's",
    ),
    Conflict(
        "optimizer distributed",
        lambda c: c.optimizer.name == "muon" and c.distributed == "fsdp",
        "distributed=ddp, as Muon needs whole matrices; or optimizer=adamw",
    ),
)
