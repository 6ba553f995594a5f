import shlex
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml

from fullstride.errors import ConfigError
from fullstride.launch import skypilot
from fullstride.launch.request import SkyPilotRequest
from fullstride.launch.skypilot import plan, task_of, validated
from tests.launch.commands import attempts_in

TRAIN = ["meanflow", "train", "epochs=3", "run_name=it's"]
BIG = SkyPilotRequest(gpus=8, gpu="H100", nodes=2, cpus=64, memory=512.0, spot=True, image="a/b:c", setup=("echo x",))


def test_a_task_and_its_defaults():
    task = task_of(SkyPilotRequest(), TRAIN, "launch-1")
    assert task["resources"] == {"accelerators": "A100:1"}
    assert task["num_nodes"] == 1
    assert task["file_mounts"]["/fullstride/runs"] == {"name": "fullstride-runs", "mode": "MOUNT_CACHED"}
    words = shlex.split(task["run"].splitlines()[1])
    assert words[:3] == ["/fullstride/venv/bin/python", "-m", "fullstride.launch.container"]
    assert {"--launch=launch-1", "--retries=5", "--delay=30", "--seconds=43200", "--processes=1"} <= set(words)
    assert words[words.index("--") + 1 :] == TRAIN
    assert "torch==" in task["setup"]


def test_a_benchmark_takes_its_folder_along():
    task = task_of(SkyPilotRequest(), ["benchmarks", "jvp-norms", "--out", "/fullstride/runs/a"], "launch-1")
    assert {"/fullstride/source/fullstride", "/fullstride/source/benchmarks"} <= set(task["file_mounts"])
    assert not any("benchmarks" in place for place in task_of(SkyPilotRequest(), TRAIN, "a")["file_mounts"])


def test_what_was_asked_for_is_in_the_task():
    task = task_of(BIG, ["meanflow", "train"], "x")
    assert task["resources"] == {
        "accelerators": "H100:8", "cpus": "64+", "memory": "512+", "image_id": "docker:a/b:c", "use_spot": True
    }  # fmt: skip
    assert task["num_nodes"] == 2
    assert task["setup"].endswith("\necho x\n")
    given = 'export SKYPILOT_NODE_RANK=1 SKYPILOT_NODE_IPS="$(printf "10.0.0.1\\n10.0.0.2")"; cd() { :; }\n'
    line = task["run"].replace("/fullstride/venv/bin/python -m fullstride.launch.container", "printf '%s\\n'")
    done = subprocess.run(["bash", "-c", given + line], capture_output=True, text=True, check=True)
    assert {"--nodes=2", "--rank=1", "--meeting=10.0.0.1:29400"} <= set(done.stdout.splitlines())


@pytest.mark.parametrize("request_", [SkyPilotRequest(), SkyPilotRequest(gpus=0), BIG], ids=["1", "cpu", "big"])
def test_skypilot_takes_the_task(request_):
    if find_spec("sky") is None:
        assert "not installed here" in validated(task_of(request_, ["meanflow", "train"], "x"))
        pytest.skip("SkyPilot is no dependency of these tests; where it is installed it is asked")
    assert "checked by SkyPilot" in validated(task_of(request_, ["meanflow", "train"], "x"))
    with pytest.raises(ConfigError, match="launch skypilot: "):
        validated(task_of(request_, ["meanflow", "train"], "x") | {"nonsense": 1})


def test_the_files_are_the_shown_yaml_one_for_each_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(skypilot, "runs_of", lambda words: [[*words[:2], f"seed={seed}"] for seed in (0, 1)])
    made = plan(SkyPilotRequest(name="it", folder=str(tmp_path)), ["meanflow", "train", "-m", "seed=0,1"])
    assert made.submit() == 0
    tasks = [yaml.safe_load((tmp_path / f"it-{i}.yaml").read_text()) for i in (0, 1)]
    assert list(yaml.safe_load_all(made.text)) == tasks
    assert [task["run"].split()[-1] for task in tasks] == ["seed=0", "seed=1"]
    assert capsys.readouterr().out.count("sky jobs launch") == 2


def test_a_run_that_would_be_lost_is_refused():
    with pytest.raises(ConfigError, match="it would end with the container"):
        task_of(SkyPilotRequest(), ["meanflow", "train", "output_dir=out"], "x")


def test_a_task_that_begins_again_on_another_machine_goes_on(tmp_path):
    (tmp_path / "record").mkdir()
    code = (
        "import sys; from fullstride.launch import container; from tests.launch.commands import ending; "
        "from pathlib import Path; make = ending(Path(sys.argv[1]), '75', '1', '0'); "
        "container.torchrun_command = lambda words, **given: make(words); sys.exit(container.main(sys.argv[2:]))"
    )
    options = ["--launch=a", f"--runs={tmp_path}", "--retries=1", "--delay=0", "--seconds=0", "--", *TRAIN]
    command = [sys.executable, "-c", code, str(tmp_path / "record"), *options]
    assert subprocess.run(command, capture_output=True).returncode == 1
    assert subprocess.run(command, capture_output=True).returncode == 0
    resumed = [*TRAIN, "resume=true"]
    assert attempts_in(tmp_path / "record") == [TRAIN, resumed, resumed]
