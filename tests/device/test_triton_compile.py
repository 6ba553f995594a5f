import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from fullstride.device import triton_compile
from fullstride.jvp.norms.launch import launch
from fullstride.step.torch.runners import comparison as gate
from tests.step.torch.test_train_step import batches, make

CPU = torch.device("cpu")
triton = pytest.importorskip("triton")


class Kernel:
    """Kernel that notes its compilations and launches."""

    def __init__(self, fails: bool = False):
        self.fails, self.ran, self.asked = fails, [], []
        self.compiled: list[threading.Thread] = []
        self.waits = threading.Event()
        self.fn = SimpleNamespace(__qualname__="scale_rows")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.ran.append((grid, args, options))

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.asked.append((grid, args, options))
        mode = triton.runtime._async_compile.active_mode.get()
        mode.submit(len(self.asked), self._compile, lambda kernel: None)

    def _compile(self) -> None:
        assert self.waits.wait(10)
        self.compiled.append(threading.current_thread())
        if self.fails:
            raise ValueError("cannot be compiled")


class Tile(NamedTuple):
    """Constants of a kernel, which it reads by their names."""

    rows: int
    like: Any


@pytest.fixture
def on_cpu(monkeypatch):
    """Pretend that a CPU has kernels."""
    monkeypatch.setattr(triton_compile, "KIND", "cpu")
    monkeypatch.setattr(triton_compile, "_able", lambda: True)
    monkeypatch.setattr(triton_compile, "_processes", False)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("fails", [False, True])
def test_a_gathered_launch_is_compiled_by_a_thread_and_the_next_one_waits_for_it(fails, capsys, monkeypatch):
    monkeypatch.setattr(triton_compile, "_said", False)
    kernel, x = Kernel(fails), torch.ones(3, dtype=torch.bfloat16)
    tile = Tile(rows=8, like=x)
    with triton_compile.compile_only(CPU):
        launch(kernel, (2, 1), x, (x, 5), tile, warps=4, early=True)
        assert kernel.ran == []
    (grid, (first, (second, five), third), options) = kernel.asked[0]
    assert (grid, first.dtype, second.dtype, five, third.rows) == ((2, 1), x.dtype, x.dtype, 5, 8)
    assert third.like.data_ptr() == 0
    assert first.data_ptr() == 0
    assert options == {"num_warps": 4, "launch_pdl": True}
    assert kernel.compiled == []
    threading.Timer(0.2, kernel.waits.set).start()
    launch(kernel, (2, 1), x, (x, 5), tile, warps=4, early=True)
    assert len(kernel.compiled) == 1
    assert kernel.compiled[0] is not threading.current_thread()
    assert kernel.ran == [((2, 1), (x, (x, 5), tile), options)]
    said = "scale_rows could not be compiled ahead, which delays its first launch: cannot be compiled\n"
    assert capsys.readouterr().err == (said if fails else "")


@pytest.mark.usefixtures("on_cpu")
def test_other_threads_launch_meanwhile():
    kernel = Kernel()
    with triton_compile.compile_only(CPU), triton_compile.compile_only(CPU):
        thread = threading.Thread(target=launch, args=(kernel, (1,), 7), kwargs={"warps": 1})
        thread.start()
        thread.join()
        assert triton_compile.gathering()
    assert not triton_compile.gathering()
    assert kernel.ran == [((1,), (7,), {"num_warps": 1})]


@pytest.mark.usefixtures("on_cpu")
def test_nothing_is_asked_for_where_there_are_no_programs():
    kernel = Kernel()
    with triton_compile.compile_only(CPU):
        launch(kernel, (0, 1), warps=1)
    assert kernel.asked == kernel.ran == []


def test_elsewhere_launches_run():
    kernel = Kernel()
    with triton_compile.compile_only(CPU):
        assert not triton_compile.gathering()
        launch(kernel, (1,), 7, warps=1)
    assert kernel.ran == [((1,), (7,), {"num_warps": 1})]


@pytest.mark.usefixtures("on_cpu")
def test_the_pass_that_compiles_leaves_no_trace(seed, monkeypatch):
    passes = []
    gathered = gate.compile_only
    monkeypatch.setattr(gate, "compile_only", lambda device: passes.append(device) or gathered(device))
    found = []
    for able in (True, False):
        monkeypatch.setattr(triton_compile, "_able", lambda able=able: able)
        model, step = make(seed)
        metrics = [step(batch)["loss"] for batch in batches(seed)]
        found.append([*metrics, *model.parameters(), *model.buffers(), *step.ema.model.parameters()])
    assert passes == [CPU, CPU]  # of the first shapes and of others; what fp32 compiles serves the comparison, too
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
