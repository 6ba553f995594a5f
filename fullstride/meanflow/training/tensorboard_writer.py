"""TensorBoard's event files, as far as scalars need them.

Written here because it takes less than the packages that do it: nothing to install, and a full disk is an error of the
step that met it. tensorboardX writes from a thread; if that dies, its bounded queue blocks the training for ever.

A file is a row of records (length, its checksum, data, its checksum), the data an `Event` message: 1 wall time, 2 step,
then one of 3 file version, 5 summary, 7 session log (tensorboard/compat/proto/event.proto).
"""

import struct
import time
from pathlib import Path

VERSION = b"brain.Event:2"
SESSION_START = b"\x08\x01"  # SessionLog: field 1, status, is 1, START
VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5


def _table(polynomial: int = 0x82F63B78) -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ polynomial * (value & 1) for value in table]
    return table


_CRC = _table()


def _masked_crc(data: bytes) -> bytes:
    """CRC-32C, rotated and shifted as TFRecord files have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, kind: int, payload: bytes) -> bytes:
    return _varint(number << 3 | kind) + (_varint(len(payload)) if kind == BYTES else b"") + payload


def record(wall_time: float, step: int, number: int, payload: bytes) -> bytes:
    """One record: an event with `payload` as its field `number`."""
    at = _field(2, VARINT, _varint(step)) if step else b""
    data = _field(1, EIGHT_BYTES, struct.pack("<d", wall_time)) + at + _field(number, BYTES, payload)
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def summary(values: dict[str, float]) -> bytes:
    """A summary message of scalars, in fp32."""
    scalars = [
        _field(1, BYTES, tag.encode()) + _field(2, FOUR_BYTES, struct.pack("<f", value))
        for tag, value in values.items()
    ]
    return b"".join(_field(1, BYTES, scalar) for scalar in scalars)


class EventFile:
    """A new event file in `folder`, behind those that are there; each write reaches the file before it returns."""

    def __init__(self, folder: Path, step: int):
        """Open it for a run that has made `step` steps; a reader forgets what earlier files say of later ones."""
        folder.mkdir(parents=True, exist_ok=True)
        # Not as many as there are: of those before it some may have been removed.
        taken = [path.suffix[1:] for path in folder.glob("*.tfevents.*")]
        number = max((int(last) + 1 for last in taken if last.isdecimal()), default=0)
        self.path = folder / f"events.out.tfevents.{number:06}"
        self._write(0, 3, VERSION)
        self._write(step + 1, 7, SESSION_START)

    def _write(self, step: int, number: int, payload: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(record(time.time(), step, number, payload))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Append one point to the curve of each name."""
        self._write(step, 5, summary(values))

    def close(self) -> None:
        """Nothing is pending."""
