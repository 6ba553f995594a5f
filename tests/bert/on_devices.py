"""Trains on two virtual devices: `python -m tests.bert.on_devices TEXTS FOLDER key=value...`."""

import os
import sys
from pathlib import Path

from tests.helpers.compiled_soon import FLAGS

os.environ["XLA_FLAGS"] = f"{FLAGS} --xla_force_host_platform_device_count=2"

import jax

from fullstride.bert.model import config
from tests.bert.runs import TINY, run, settings

if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    config.SIZES["tiny"] = TINY
    texts, folder, *given = sys.argv[1:]
    buffers = run(settings(Path(texts), Path(folder), *given)).state.buffers
    sys.stdout.write(f"{len(buffers[0].sharding.device_set)} devices\n")
