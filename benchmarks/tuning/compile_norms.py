"""Compile the norms' kernels for Hopper, as the tables launch them, on a machine with or without a GPU.

    python -m benchmarks.tuning.compile_norms --out norms-registers.json

For every case of `tune_norms`: registers a thread, bytes of spills and of shared memory, the warps that a
multiprocessor holds by its registers, and how many global accesses of each width the PTX has.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.tuning import norms as tune_norms
from fullstride.jvp.norms import group_norm, rows
from fullstride.jvp.norms import reduce_params as partials

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
REGISTERS, LANES = 65536, 32
ALIGNED = [["tt.divisibility", 16]]


def source(kernel: Any, arguments: tuple[Any, ...]) -> ASTSource:
    """The kernel, specialised to its arguments as a launch would."""
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name], attributes[(i,)] = "*" + TYPES[value.dtype], ALIGNED
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[(i,)] = ALIGNED
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def widths(ptx: str) -> dict[str, int]:
    """Global accesses by their bytes."""
    found = Counter()
    for access, vector, bits in re.findall(r"\b(ld|st)\.global(?:\.(?!v\d|b\d)\w+)*(?:\.v(\d))?\.b(\d+)", ptx):
        found[f"{access}{int(vector or 1) * int(bits) // 8}"] += 1
    found["async"] = len(re.findall(r"cp\.async\.c[ag]", ptx))
    return dict(found)


def resources(kernel: Any, arguments: tuple[Any, ...], warps: int, most: int | None) -> dict[str, Any]:
    """What the compiled kernel takes, if it may take at most so many registers."""
    options = {"num_warps": warps, "maxnreg": most}
    compiled = triton.compile(source(kernel, arguments), target=GPUTarget("cuda", 90, LANES), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [str(PTXAS), "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = (int(re.findall(p, log)[0]) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    resident = REGISTERS // (registers * LANES * warps) * warps
    shared = {"shared_bytes": compiled.metadata.shared, "resident_warps": min(resident, 64)}
    return {"registers": registers, "spill_bytes": spills, **shared, "accesses": widths(compiled.asm["ptx"])}


def main() -> None:
    """Compile each case's launches and write what they take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    options = parser.parse_args()
    tune_norms.DEVICE = "meta"
    launches: list[tuple[Any, tuple[int, ...], tuple[Any, ...], int, int | None]] = []
    modules: tuple[Any, ...] = (rows, group_norm, partials)
    for module in modules:
        module.launch = lambda kernel, grid, *given, warps, registers=None, early=False: launches.append(
            (kernel, grid, given, warps, registers)
        )
    found = []
    for case in tune_norms.cases(options.only):
        launches.clear()
        case.call(case.module)(*case.draw())
        for kernel, grid, arguments, warps, most in launches:
            row = {"kernel": kernel.fn.__name__, "grid": grid, "warps": warps}
            found.append({"case": str(case), **row, **resources(kernel, arguments, warps, most)})
            sys.stdout.write(" ".join(str(v) for v in found[-1].values()) + "\n")
            sys.stdout.flush()
    options.out.write_text(json.dumps({"triton": triton.__version__, "target": "sm_90a", "kernels": found}, indent=1))


if __name__ == "__main__":
    main()
