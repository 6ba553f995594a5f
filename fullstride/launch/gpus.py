"""GPUs of this machine as NVIDIA's driver finds them; no framework is imported."""

import os
import subprocess
import sys

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Seconds; a driver that takes longer to answer hangs.
PATIENCE = 60.0
# In a process of its own, as the driver reads CUDA_VISIBLE_DEVICES once.
_COUNT = """
import ctypes
found, cuda = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(found))
print(found.value)
"""


def count_gpus(visible: str | None = None) -> int:
    """Count the GPUs that a process finds.

    Args:
        visible: CUDA_VISIBLE_DEVICES of that process; this process's own if None.

    Returns:
        Number of GPUs; 0 without NVIDIA's driver, or if it does not answer.

    """
    given = {} if visible is None else {VISIBLE: visible}
    line = [sys.executable, "-S", "-c", _COUNT]
    try:
        done = subprocess.run(line, env=os.environ | given, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return 0
    return int(done.stdout) if done.returncode == 0 else 0
