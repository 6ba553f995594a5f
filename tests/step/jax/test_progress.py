import io

import numpy as np
import optax
from rich.console import Console

from fullstride.step.jax import TrainStep
from fullstride.step.jax.progress import tracked
from tests.step.jax.nets import Net, batch_of, squared


def test_a_bar_shows_a_late_loss_and_the_split():
    step = TrainStep(squared, optax.sgd(0.1), Net(0))
    state, out, bar = step.init(), io.StringIO(), None
    console = Console(file=out, force_terminal=True, width=140)
    for batch, bar in tracked([batch_of(i) for i in range(4)], step, every=0.0, console=console):
        state, late = step(state, batch)
        bar.show(late)
        if late:
            assert bar.line.startswith(f"step {late.step} loss {np.float32(late['loss']):.4g}, host ")
    assert bar is not None
    assert "4/4" in out.getvalue()
    assert "step 3 loss" in out.getvalue()


def test_losses_are_read_no_more_often_than_asked():
    step = TrainStep(squared, optax.sgd(0.1), Net(0))
    state, lines = step.init(), set()
    for batch, bar in tracked(
        iter([batch_of(i) for i in range(4)]), step, total=4, every=1e9, console=Console(quiet=True)
    ):
        state, late = step(state, batch)
        bar.show(late)
        lines.add(bar.line)
    assert len(lines) == 2
