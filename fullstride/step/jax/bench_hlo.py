"""What XLA fused: which of an optimised program's computations draw random bits, and what else they do."""

import re

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = \S+ ([\w\-]+)\(", re.MULTILINE)
CALLED = re.compile(r"calls=%?([\w.\-]+)")
# Threefry, JAX's generator, is rotations and exclusive ors; few other computations have as many.
ROUNDS = 10


def fused(hlo: str) -> dict[str, int]:
    """Of a program as text: fused computations, those that draw random bits, those of them that drop by it as well.

    Returns:
        `fusions`; `random`, which draw bits by XLA's generator or JAX's; `random_and_select`, which select in the
        same computation, too; `operations_of_largest_random`.

    """
    bodies = dict(COMPUTATION.findall(hlo))
    operations = [OPERATION.findall(bodies[name]) for name in set(CALLED.findall(hlo)) & bodies.keys()]
    random = [ops for ops in operations if "rng-bit-generator" in ops or ops.count("xor") >= ROUNDS]
    return {
        "fusions": len(operations),
        "random": len(random),
        "random_and_select": sum("select" in ops for ops in random),
        "operations_of_largest_random": max(map(len, random), default=0),
    }
