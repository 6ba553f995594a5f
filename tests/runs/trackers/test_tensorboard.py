import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from fullstride.runs.trackers.tensorboard import EventFile


def checksum(data: bytes) -> int:
    """CRC-32C bit by bit, masked."""
    crc = 0xFFFFFFFF
    for bit in (byte >> i & 1 for byte in data for i in range(8)):
        crc = crc >> 1 ^ (0x82F63B78 if (crc & 1) != bit else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


def number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def fields(data: bytes) -> list[tuple[int, Any]]:
    """A message's fields, by the encoding's public description."""
    found, at = [], 0
    while at < len(data):
        key, at = number(data, at)
        if key & 7 == 0:
            value, at = number(data, at)
        else:
            size, at = number(data, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = data[at : at + size], at + size
        found.append((key >> 3, value))
    return found


def events(path: Path) -> list[dict]:
    found, data = [], path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + length]
        expected = struct.pack("<I", checksum(data[:8])), struct.pack("<I", checksum(body))
        assert (data[8:12], data[12 + length : 16 + length]) == expected
        found.append(dict(fields(body)))
        data = data[16 + length :]
    return found


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """Curves as a reader shows them: a session that starts at step s hides earlier points of step s and later."""
    shown: dict[str, dict[int, float]] = {}
    for path in sorted(folder.iterdir()):
        for event in events(path):
            step = event.get(2, 0)
            if event.get(7) == b"\x08\x01":
                shown = {tag: {s: v for s, v in points.items() if s < step} for tag, points in shown.items()}
            for _, scalar in fields(event.get(5, b"")):
                (_, tag), (_, value) = fields(scalar)
                shown.setdefault(tag.decode(), {})[step] = struct.unpack("<f", value)[0]
    return shown


def test_what_was_logged_is_read_back(tmp_path, seed):
    values = torch.randn(200, generator=torch.Generator().manual_seed(seed)).tolist()
    file = EventFile(tmp_path / "a" / "tensorboard", 0)
    for i, value in enumerate(values):
        file.log(i * 37 + 1, {"train/loss": value, "lr": value**2})
    # Before close: a run that is killed has lost nothing.
    shown = curves(tmp_path / "a" / "tensorboard")
    file.close()
    assert shown["train/loss"] == {i * 37 + 1: value for i, value in enumerate(values)}
    assert shown["lr"][38] == pytest.approx(values[1] ** 2, rel=1e-6)


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path):
    first = EventFile(tmp_path, 0)
    for step in (10, 20, 30, 40):
        first.log(step, {"loss": float(step)})
    first.close()
    second = EventFile(tmp_path, 20)
    second.log(30, {"loss": -1.0})
    second.close()
    assert curves(tmp_path)["loss"] == {10: 10.0, 20: 20.0, 30: -1.0}


def test_many_sessions_are_read_in_their_order(tmp_path):
    for session in range(12):
        file = EventFile(tmp_path, 0)
        file.log(5, {"loss": float(session)})
        file.close()
    assert curves(tmp_path)["loss"] == {5: 11.0}


def test_a_session_comes_last_whatever_was_removed(tmp_path):
    """A reader that has gone on to the last file does not go back."""
    for step in (1, 2, 3):
        file = EventFile(tmp_path, step)
        file.log(step, {"loss": float(step)})
        file.close()
    for path in sorted(tmp_path.iterdir())[:2]:
        path.unlink()
    made = EventFile(tmp_path, 3)
    made.log(4, {"loss": 4.0})
    made.close()
    assert made.path == max(tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2
    assert curves(tmp_path)["loss"] == {3: 3.0, 4: 4.0}
