"""Loops as people write them, captured on a GPU: `python -m pytest tests/gpu/test_loops.py`."""

import pytest
import torch

from tests.step.torch.loops import LOOPS, by_hand, by_step, made, step_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CAPTURED = [name for name, loop in LOOPS.items() if loop.captured]
# A compiled loss keeps fp32 between its operations: it overflows at other steps than the loop, which skips these.
OVERFLOWS = ("fp16", "fp16, two optimizers")


@pytest.mark.parametrize("name", LOOPS)
def test_eager_steps_are_those_of_the_loop(name, seed):
    found, _ = by_step(LOOPS[name], seed, "cuda", backend="eager")
    torch.testing.assert_close(found, by_hand(LOOPS[name], seed, "cuda"), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which torch itself ignores
@pytest.mark.parametrize(
    ("backend", "name"),
    [("graph", name) for name in CAPTURED] + [("compile+graph", name) for name in CAPTURED if name not in OVERFLOWS],
)
def test_captured_steps_are_those_of_the_loop_to_rounding(backend, name, seed):
    torch._dynamo.reset()
    found, step = by_step(LOOPS[name], seed, "cuda", backend=backend)
    # A compiled loss in fp16 rounds elsewhere.
    rtol, atol = (2e-2, 2e-3) if name.startswith("fp16") else (2e-3, 2e-4)
    torch.testing.assert_close(found, by_hand(LOOPS[name], seed, "cuda"), rtol=rtol, atol=atol)
    assert any("recorded" in form for form in step.errors)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("name", CAPTURED)
def test_a_replay_never_waits(name, seed):
    training = made(LOOPS[name], seed, "cuda")
    step = step_of(training, backend="graph", log=lambda _: None)
    for batch in training.batches * 3:
        step(batch)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for batch in training.batches:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = step.explain()
    assert found.device_ms is not None
    assert found.device_ms > 0
    assert found.bytes["most allocated"] > found.bytes["weights"]
