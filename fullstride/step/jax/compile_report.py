"""XLA's analyses of a compiled step."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CompileReport:
    """Cost and memory of a compiled step, as XLA reports them.

    Attributes:
        trace_s: seconds to trace and lower it.
        compile_s: seconds to compile it; few if the persistent cache had it.
        flops: floating-point operations of one call, as XLA counts them; None if it does not.
        bytes_accessed: bytes of all its operations' operands and results, an upper bound of the memory traffic.
        argument_bytes: bytes of state, batch and key.
        output_bytes: bytes of new state and metrics.
        aliased_bytes: bytes of outputs that lie in donated buffers.
        temporary_bytes: bytes that it needs while it runs.
        executable: JAX's own object.

    """

    trace_s: float
    compile_s: float
    flops: float | None
    bytes_accessed: float | None
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    executable: Any

    @classmethod
    def of(cls, executable: Any, trace_s: float, compile_s: float) -> "CompileReport":
        """Read XLA's analyses."""
        cost, memory = executable.cost_analysis() or {}, executable.memory_analysis()
        return cls(
            trace_s=trace_s,
            compile_s=compile_s,
            flops=cost.get("flops"),
            bytes_accessed=cost.get("bytes accessed"),
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            aliased_bytes=memory.alias_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            executable=executable,
        )

    @property
    def hlo(self) -> str:
        """Return the optimised program as text."""
        return self.executable.as_text()

    @property
    def peak_bytes(self) -> int:
        """Device memory of a call: arguments, temporaries, and outputs that have no donated buffer."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes - self.aliased_bytes

    def __str__(self) -> str:
        work = "" if self.flops is None else f"{self.flops / 1e9:.2f} GFLOP, "
        return (
            f"traced in {self.trace_s:.1f} s, compiled in {self.compile_s:.1f} s; {work}"
            f"{self.peak_bytes / 2**20:.1f} MiB, {self.temporary_bytes / 2**20:.1f} of them temporary"
        )
