"""Pickles as Python 2 wrote them, opcode by opcode: Python 3 has no writer of its strings."""

import struct

import numpy as np


def text(value: bytes) -> bytes:
    return b"T" + struct.pack("<I", len(value)) + value


def integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def array(values: np.ndarray, code: bytes = b"u1", fortran: bool = False) -> bytes:
    shape = b"(" + b"".join(integer(n) for n in values.shape) + b"t"
    kind = b"cnumpy\ndtype\n" + text(code) + b"K\x00K\x01\x87R" + b"(K\x03" + text(b"|") + b"NNN"
    kind += integer(-1) * 2 + b"K\x00tb"
    data = text(values.tobytes(order="F" if fortran else "C"))
    made = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + text(b"b") + b"\x87R"
    return made + b"(K\x01" + shape + kind + (b"\x88" if fortran else b"\x89") + data + b"tb"


def numbers(values: list[int]) -> bytes:
    return b"](" + b"".join(integer(value) for value in values) + b"e"


def batch(**entries: bytes) -> bytes:
    """A dictionary of entries that are pickled already."""
    pairs = b"".join(text(key.encode()) + value for key, value in entries.items())
    return b"\x80\x02}(" + pairs + b"u."
