"""Rounds of means between GPUs that dawdle, as threads: they are right, and show where a meeting is missing."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fullstride.step.torch.distributed import peer_copies as peers
from fullstride.step.torch.distributed.peer_copies import PeerCopies
from tests.gpu import rounds
from tests.step.torch.distributed.test_peer_copies import Threads, plain_mean, together


class Again:
    """A record that is made anew by each replay."""

    def __init__(self, function: Callable[[], Any], _: None):
        self.replay = function


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    monkeypatch.setattr(peers, "mean_of", plain_mean)
    monkeypatch.setattr(rounds, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(rounds, "ROUNDS", 12)
    monkeypatch.setattr(rounds, "SIZES", (1, 4097, 63, 30_001, 129))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda clocks: time.sleep(clocks * 2e-9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def errors(how: type[rounds.Means] | type[rounds.Parts], n: int) -> float:
    """The largest one, where processes leave out all but every n-th meeting."""

    def act(one: PeerCopies) -> float:
        processes, dawdle, asked = Threads(one), rounds.Delays(1 + one.rank), 0
        memory = rounds.DelayedMemory(one._memory, dawdle)
        made, numbers, meet = how(processes), rounds.Numbers(processes), memory.meet

        def at_times() -> None:
            nonlocal asked
            asked += 1
            if asked % n == 0:
                meet()

        memory.meet, one._memory = at_times, memory  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():
            found = rounds.eager(made, numbers, dawdle), rounds.replayed(made, numbers, dawdle, Again)
        return float(torch.cat(found).max())

    return max(together(2, act))


@pytest.mark.parametrize("how", [rounds.Means, rounds.Parts])
def test_rounds_are_right(how):
    assert errors(how, 1) < 1e-5


@pytest.mark.parametrize("how", [rounds.Means, rounds.Parts])
def test_a_missing_meeting_shows(how):
    assert errors(how, 2) > 1e-2
