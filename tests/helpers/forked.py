"""Modules run as by `python -m`, each in a process forked from one that has imported PyTorch's compiler.

A start of Python and these imports take four seconds. What is forked has none of the tests' checks of types.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 900  # seconds; a machine may be busy
# Called with command lines, of a module and its arguments; they run at the same time.
Run = Callable[..., list[subprocess.CompletedProcess[str]]]


@contextmanager
def forks() -> Iterator[Run]:
    """Start the process that imports, and yield what runs modules in forks of it.

    `run(*lines)` returns what became of each line `[module, *arguments]`. A process that takes too long is killed, and
    returns -14. Each has the caller's environment as it is now.
    """
    command = [sys.executable, "-m", __name__]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        ask, answer = server.stdin, server.stdout

        def run(*lines: list[str]) -> list[subprocess.CompletedProcess[str]]:
            said = [str(Path(folder, str(i))) for i in range(len(lines))]
            ask.write(json.dumps({"lines": lines, "said": said, "environment": dict(os.environ)}) + "\n")
            ask.flush()
            codes = json.loads(answer.readline())
            return [_completed(*each) for each in zip(lines, codes, said, strict=True)]

        yield run
        ask.close()


def _completed(line: list[str], code: int, said: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(line, code, Path(f"{said}.out").read_text(), Path(f"{said}.err").read_text())


def _serve() -> None:
    import functorch.compile  # noqa: F401
    import torch._inductor.compile_fx

    import fullstride.meanflow.training.trainer  # noqa: F401

    torch.set_num_threads(1)
    # What the compiler imports as it goes takes two seconds more.
    torch.compile(lambda x: (x @ x.sin()).sum())(torch.ones(2, 2, requires_grad=True)).backward()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    gc.freeze()  # what was imported is neither looked through nor copied
    gc.set_threshold(20_000, 20, 20)
    for asked in map(json.loads, sys.stdin):
        pids = []
        for line, said in zip(asked["lines"], asked["said"], strict=True):
            if (pid := os.fork()) == 0:
                os.environ.clear()
                os.environ.update(asked["environment"])
                signal.alarm(PATIENCE)
                _become(said, *line)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)  # noqa: T201


def _become(said: str, module: str, *arguments: str) -> None:
    """Run the module in this process, which ends with it."""
    for descriptor, name in enumerate((os.devnull, f"{said}.out", f"{said}.err")):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    code = 1
    try:
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
