"""Trains on two virtual devices: `python -m tests.bert.on_devices TEXTS FOLDER key=value...`."""

import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

from fullstride.bert import config
from tests.bert.test_trainer import run, settings

if __name__ == "__main__":
    config.SIZES["tiny"] = (16, 1, 2)
    texts, folder, *given = sys.argv[1:]
    buffers = run(settings(Path(texts), Path(folder), *given)).state.buffers
    divided = any(not x.sharding.is_fully_replicated for x in buffers)
    sys.stdout.write(json.dumps({"devices": len(buffers[0].sharding.device_set), "divided": divided}) + "\n")
