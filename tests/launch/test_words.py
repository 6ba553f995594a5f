from pathlib import PurePosixPath

import pytest
import typer

from benchmarks.cli.app import app as benchmarks
from benchmarks.harness.result_paths import outputs
from fullstride.cli.app import app
from fullstride.errors import ConfigError
from fullstride.launch import paths
from fullstride.launch.paths import check_inputs, check_output
from fullstride.launch.words import check_command, resumed, runs_of, shared_out, value_of


def test_a_resumed_command_goes_on_whatever_the_first_was_told():
    train = ["meanflow", "train", "resume=false", "epochs=3", "overwrite=true", "--multirun", "seed=1,2"]
    assert resumed(train) == ["meanflow", "train", "epochs=3", "--multirun", "seed=1,2", "resume=true"]
    assert resumed(["bert", "train"]) == ["bert", "train", "resume=true"]
    assert resumed(["meanflow", "evaluate", "runs/x"]) == ["meanflow", "evaluate", "runs/x"]
    assert train[2] == "resume=false"


def test_several_processes_share_one_run():
    train = ["meanflow", "train", "epochs=3"]
    assert shared_out(train, 1) is train
    assert shared_out(train, 2) == [*train, "distributed=ddp"]
    assert shared_out([*train, "distributed=ddp"], 2) == [*train, "distributed=ddp"]
    with pytest.raises(ConfigError, match="distributed=none in 3 processes: expected distributed=ddp or fsdp"):
        shared_out([*train, "distributed=none"], 3)
    assert shared_out([*train, "distributed=fsdp"], 2) == [*train, "distributed=fsdp"]
    assert shared_out(["meanflow", "sample", "runs/x"], 2) == ["meanflow", "sample", "runs/x"]
    for words in (["bert", "train"], [*train, "-m"]):
        with pytest.raises(ConfigError, match="in 2 processes: expected meanflow train of one run"):
            shared_out(words, 2)


def test_mistakes_are_found_before_a_machine_is_asked_for():
    check_command(["meanflow", "train", "model=unet_tiny"])
    check_command(["meanflow", "train", "--help"])
    check_command(["llm", "generate", "x"])
    with pytest.raises(ConfigError, match="model=unett: expected one of"):
        check_command(["meanflow", "train", "model=unett"])
    with pytest.raises(ConfigError, match=r"loss\.meanflow_ratio=2\.0: expected a share"):
        check_command(["meanflow", "train", "-m", "seed=0,1", "loss.meanflow_ratio=2"])
    with pytest.raises(ConfigError, match="no command; expected one after --"):
        check_command([])
    for word in ("launch", "fullstride"):
        with pytest.raises(ConfigError, match="expected a command without "):
            check_command([word, "meanflow", "train"])


@pytest.mark.parametrize(
    ("words", "processes", "message"),
    [
        (["data.batch_size=64"], 3, "data.batch_size=64 over 3 processes: expected a multiple of 3; .* such as 66"),
        (["-m", "seed=0,1", "data.batch_size=64"], 6, "data.batch_size=64 over 6 processes: expected a multiple of 6"),
        (["loss.weighting=huber", "data.batch_size=8"], 8, "loss.weighting=huber expects at least 2 in each"),
        (["data.batch_size=8", "loss.meanflow_ratio=0.25"], 4, "is 4 samples over the processes and 2 in one process"),
        (["distributed=none"], 2, "distributed=none in 2 processes: expected distributed=ddp or fsdp"),
        (["device=mps", "data.batch_size=64"], 2, "device=mps: expected device=cuda or cpu"),
    ],
)
def test_what_processes_cannot_share_is_found_before_a_machine_is_asked_for(words, processes, message):
    train = ["meanflow", "train", "model=unet_tiny", *words]
    with pytest.raises(ConfigError, match=message):
        check_command(train, processes)
    check_command(["meanflow", "train", "data.batch_size=64", "loss.meanflow_ratio=0.25", "device=cuda"], 4)
    check_command(["meanflow", "sample", "runs/x"], processes)


def test_a_sweep_is_a_command_a_run():
    swept = runs_of(["meanflow", "train", "--multirun", "seed=0,1", "epochs=2", "run_name=a"])
    assert swept == [["meanflow", "train", f"seed={seed}", "epochs=2", f"run_name=a_seed={seed}"] for seed in (0, 1)]
    assert runs_of(["meanflow", "train", "epochs=2"]) == [["meanflow", "train", "epochs=2"]]


def test_a_sweep_without_what_knows_its_values_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("fullstride.launch.words.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"from the root of a clone: pip install '\.\[torch\]'"):
        runs_of(["meanflow", "train", "--multirun", "seed=0,1"])


KEPT = ["/fullstride/runs", "/data"]


@pytest.fixture
def in_process(monkeypatch):
    """Ask the benchmarks for their places here; tests of the back ends start the process."""
    monkeypatch.setattr(paths, "_of_benchmarks", lambda words: outputs(typer.main.get_command(benchmarks), words[1:]))


def test_a_run_must_land_where_it_stays():
    good = ("runs", "/fullstride/runs/a", "/data", "runs/sweep1", "./runs/a", "../data/a", "runs/a/../b")
    for setting in ([], *([f"output_dir={place}"] for place in good)):
        check_output(["meanflow", "train", *setting], KEPT)
    for bad in ("other", "/fullstride", "/data/../tmp", "/database", "runs/../other", "../runs"):
        with pytest.raises(
            ConfigError, match=r"it would end with the container; leave it out \(it is /fullstride/runs\)"
        ):
            check_output(["meanflow", "train", f"output_dir={bad}"], KEPT)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("meanflow sample runs/first --out samples", "--out samples: .*; give --out runs/samples or name a folder"),
        ("meanflow sample runs/first --out=/tmp/samples", "--out /tmp/samples: .*; give --out runs/samples or"),
        ("meanflow export runs/first --out model.pt2", "give --out runs/model.pt2 or"),
        ("meanflow encode /data/pictures --out ../latents", "give --out runs/latents or"),
        ("meanflow demo --out demo", "give --out runs/demo or"),
        ("bert export runs/first weights", "^weights: it would .*; give runs/weights or"),
        ("benchmarks meanflow-step", r"--out benchmarks/results \(the default\): .*; give --out runs/results or"),
        ("benchmarks train-step --out runs/a --profile trace", "--profile trace: .*; give --profile runs/trace or"),
        ("benchmarks phase2", r"--out benchmarks/results \(the default\): .*; give --out runs/results or"),
        ("benchmarks overfit --seed 2 --seed 1 --seed=0", "--out benchmarks/results"),
        ("benchmarks overfit --out runs/results --runs mine", "--runs mine: .*; give --runs runs/mine or"),
        ("benchmarks llm --runs 3", r"--out benchmarks/results \(the default\)"),
        ("benchmarks bert --minutes=20 --seed 0", "--out benchmarks/results"),
        ("benchmarks phase2 --out runs/results --runs mine", "--runs mine: .*; give --runs runs/mine or"),
        ("benchmarks bert data.path=/data/text", r"--out benchmarks/results \(the default\)"),
        ("benchmarks time-to-quality --gpus 0,1 --code official", r"--out benchmarks/results \(the default\)"),
        ("benchmarks time-to-quality --collect optimizer.decay=cosine ema.decays=[0.9]", "--out benchmarks/results"),
        (
            "benchmarks report site --out page",
            "give --out runs/page or name a folder in one that stays: /fullstride/runs",
        ),
    ],
)
@pytest.mark.usefixtures("in_process")
def test_what_a_command_makes_must_land_where_it_stays(command, message):
    with pytest.raises(ConfigError, match=message):
        check_output(command.split(), KEPT)


@pytest.mark.parametrize(
    "command",
    [
        "meanflow sample runs/first",
        "meanflow sample runs/first --out runs/samples",
        "meanflow sample runs/first --out=lost --out=/data/samples",
        "meanflow evaluate runs/first",
        "meanflow demo",
        "bert export runs/first /data/weights",
        "benchmarks meanflow-step --out /fullstride/runs/results",
        "benchmarks phase2 --scale smoke",
        "benchmarks phase2 --scale=smoke --runs /data/experiments",
        "benchmarks phase2 optimizer.lr=1e-3",
        "benchmarks phase2 --seed 0 --seed=2",
        "benchmarks bert --minutes 1",
        "benchmarks bert data.path=/data/text seed=3",
        "benchmarks time-to-quality --code fullstride --seed 0",
        "benchmarks report runs elsewhere",
        "benchmarks llm --runs 3 --out runs/results",  # a number
        "benchmarks jvp-norms --help --out runs/results",
        "benchmarks",
        "llm pull smollm2",
        "doctor",
    ],
)
@pytest.mark.usefixtures("in_process")
def test_what_lands_where_it_stays_is_launched(command):
    check_output(command.split(), KEPT)


def test_every_default_of_an_output_is_known():
    """A command whose --out is new must say where that is, or be in `runs`."""
    context = typer.main.get_command(app).make_context("fullstride", [], resilient_parsing=True)
    for area, group in vars(context.command)["commands"].items():
        for name, command in getattr(group, "commands", {}).items():
            default = next((p.default for p in command.params if "--out" in p.opts), None)
            if area == "launch" or default is None or PurePosixPath(default).is_relative_to("runs"):
                continue
            with pytest.raises(ConfigError, match=f"--out {default} "):
                check_output([area, name], KEPT)


def test_the_value_of_a_setting():
    assert value_of(["meanflow", "train", "a=b=c", "ab=d"], "a") == "b=c"
    assert value_of(["meanflow", "train"], "a") is None


@pytest.mark.parametrize(
    "command",
    [
        "meanflow train data=image_folder data.path=pictures",
        "bert train data=text_files data.path=../books",
        "bert train data.tokenizer=tok.json",
        "bert train model.init=weights",
    ],
)
def test_what_lies_on_this_machine_is_not_read_on_another(command):
    with pytest.raises(
        ConfigError, match=rf"{command.split()[-1]}: a path of this machine does not exist there; put it there"
    ):
        check_inputs(command.split(), "put it there")


@pytest.mark.parametrize(
    "command",
    [
        "meanflow train data=image_folder data.path=/data/pictures",
        "bert train data=hf_dataset data.path=user/texts data.tokenizer=minilm",
        "bert train model.init=runs/weights",
    ],
)
def test_what_another_machine_has_is_read(command):
    check_inputs(command.split(), "")
