"""PyTorch's two interfaces to TF32, each setting in a fork of one process, as they are global."""

import subprocess
import sys

MATMUL, CUDNN = "torch.backends.cuda.matmul", "torch.backends.cudnn"
SETTINGS = {
    "": (False, True),
    f"{MATMUL}.allow_tf32 = True": (True, True),
    "torch.set_float32_matmul_precision('medium')": (True, True),
    f"{MATMUL}.fp32_precision = 'tf32'": (True, True),
    "torch.backends.fp32_precision = 'tf32'": (True, True),
    f"{MATMUL}.allow_tf32 = True; {MATMUL}.fp32_precision = 'tf32'": (True, True),
    f"torch.set_float32_matmul_precision('high'); {MATMUL}.fp32_precision = 'ieee'": (False, True),
    f"torch.backends.fp32_precision = 'tf32'; {MATMUL}.allow_tf32 = False": (False, True),
    f"{CUDNN}.conv.fp32_precision = 'ieee'": (False, False),
    f"{CUDNN}.fp32_precision = 'ieee'": (False, False),
    f"{CUDNN}.allow_tf32 = False": (False, False),
}
PROGRAM = """
import os, torch
from fullstride.jvp.attention.register import _options
from fullstride.device.precision import current_formats, rounds_convolutions, rounds_products, matmul_precision

def check(setting, expected):
    exec(setting)
    before, device = (rounds_products(), rounds_convolutions()), torch.device("cpu")
    assert before == expected, before
    assert _options((1.0, False, -1, -1, "", "triton"))[0]["precision"] == ("tf32" if before[0] else "ieee")
    with matmul_precision("fp32", device):
        assert not rounds_products() and not rounds_convolutions()
        assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
        assert current_formats(device) == (False, False, None)
    assert (rounds_products(), rounds_convolutions()) == before

for setting, expected in SETTINGS.items():
    if os.fork() == 0:
        check(setting, expected)
        os._exit(0)
    assert os.wait()[1] == 0, setting
"""


def test_either_interface_is_obeyed_and_put_back():
    command = [sys.executable, "-W", "error", "-c", f"SETTINGS = {SETTINGS}\n{PROGRAM}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
