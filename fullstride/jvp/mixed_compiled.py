"""Facts that the compiler hides from a rule about an operator between a plain tensor and a `MixedBatch`.

Dynamo gives a rule the tensor first, whichever side it stood on, and takes `batch += tensor` for a sum. Both are read
off the instruction that it traces.
"""

from opcode import _nb_ops  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from torch._dynamo.comptime import comptime


def _operator(context: Any) -> str:
    """Return the operator, such as `+=`, that led to `__torch_function__`; nothing for a call of a function."""
    frame = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    while frame.f_code.co_name != "__torch_function__":
        frame = frame.parent
    instruction = frame.parent.current_instruction
    return _nb_ops[instruction.arg][1] if instruction.opname == "BINARY_OP" else ""


def _refuse_in_place(context: Any) -> None:
    if (symbol := _operator(context)).endswith("="):
        raise ValueError(
            f"a compiled `batch {symbol} tensor`, where batch is one in which only some samples carry a tangent: other "
            f"names and views of it would keep the old values; write `batch = batch {symbol[:-1]} tensor`, or use "
            "loss.split=static"
        )


def _refuse_operator(context: Any) -> None:
    if symbol := _operator(context):
        raise ValueError(
            f"a compiled `{symbol}` of a batch in which only some samples carry a tangent and a plain tensor, both of "
            "which could be the first; call torch.matmul, or use loss.split=static"
        )


def refuse_in_place() -> None:
    """Raise while compiling, inside `__torch_function__`, for an operator that writes in place."""
    comptime(_refuse_in_place)


def refuse_operator() -> None:
    """Raise while compiling, inside `__torch_function__`, for an operator rather than a call."""
    comptime(_refuse_operator)
