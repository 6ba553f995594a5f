"""What XLA fused: which of an optimised program's computations draw random bits or exponentiate, and what else."""

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
        same computation, too; `operations_of_largest_random`; `exponential`, such as a softmax's;
        `exponential_and_select`, which mask in the same computation; `exponential_and_random`, which drop in it.

    """
    bodies = dict(COMPUTATION.findall(hlo))
    operations = [OPERATION.findall(bodies[name]) for name in set(CALLED.findall(hlo)) & bodies.keys()]
    random = [ops for ops in operations if _draws(ops)]
    exponential = [ops for ops in operations if "exponential" in ops]
    return {
        "fusions": len(operations),
        "random": len(random),
        "random_and_select": sum("select" in ops for ops in random),
        "operations_of_largest_random": max(map(len, random), default=0),
        "exponential": len(exponential),
        "exponential_and_select": sum("select" in ops for ops in exponential),
        "exponential_and_random": sum(map(_draws, exponential)),
    }


def _draws(operations: list[str]) -> bool:
    return "rng-bit-generator" in operations or operations.count("xor") >= ROUNDS
