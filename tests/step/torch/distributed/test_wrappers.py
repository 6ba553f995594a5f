import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_wrapped_models_and_weights_over_processes_end_as_one_process(tmp_path):
    command = [sys.executable, "-m", "tests.step.torch.distributed.wrapped"]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], said
