import pytest

from fullstride.errors import ConfigError
from fullstride.launch.words import check_command, check_output, resumed, runs_of, shared_out, value_of


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
        with pytest.raises(ConfigError, match="expected a command without it"):
            check_command([word, "meanflow", "train"])


@pytest.mark.parametrize(
    ("words", "processes", "message"),
    [
        (["data.batch_size=64"], 3, "data.batch_size=64 over 3 processes: expected a multiple of 3; .* such as 66"),
        (["-m", "seed=0,1", "data.batch_size=64"], 6, "data.batch_size=64 over 6 processes: expected a multiple of 6"),
        (["loss.weighting=huber", "data.batch_size=8"], 8, "loss.weighting=huber expects at least 2 in each"),
        (["data.batch_size=8", "loss.meanflow_ratio=0.25"], 4, "is 4 samples there and 2 in one process"),
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


def test_a_run_must_land_where_it_stays():
    kept = ["/fullstride/runs", "/data"]
    for good in ([], ["output_dir=runs"], ["output_dir=/fullstride/runs/a"], ["output_dir=/data"]):
        check_output(["meanflow", "train", *good], kept)
    for bad in ("other", "/fullstride", "/data/../tmp", "/database"):
        with pytest.raises(
            ConfigError, match=r"it would end with the container; leave it out \(it is /fullstride/runs\)"
        ):
            check_output(["meanflow", "train", f"output_dir={bad}"], kept)


def test_the_value_of_a_setting():
    assert value_of(["meanflow", "train", "a=b=c", "ab=d"], "a") == "b=c"
    assert value_of(["meanflow", "train"], "a") is None
