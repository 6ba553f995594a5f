import pickle
import sys
from pathlib import Path
from typing import Any

import modal
import pytest
from modal_proto import api_pb2

import fullstride
from fullstride.errors import ConfigError
from fullstride.launch import container, modal_app, modal_function
from fullstride.launch.modal_app import app_of, plan, spec_of
from fullstride.launch.modal_function import AttemptFailed, attempt
from fullstride.launch.request import ModalRequest
from tests.launch.commands import attempts_in, ending

TRAIN = ["meanflow", "train", "epochs=3"]


def sent(service) -> Any:
    (request,) = service.requests("FunctionCreate")
    return request.function


def test_the_service_is_told_of_the_hardened_defaults(service):
    assert plan(ModalRequest(), TRAIN).submit() == 0
    function = sent(service)
    assert function.timeout_secs == 12 * 3600
    policy = function.retry_policy
    assert (policy.retries, policy.initial_delay_ms, policy.backoff_coefficient) == (5, 30_000, 1.0)
    assert (function.resources.gpu_config.gpu_type, function.resources.gpu_config.count) == ("A100-40GB", 1)
    assert {mount.mount_path: mount.volume_id for mount in function.volume_mounts} == {
        "/fullstride/runs": "vo-fullstride-runs",
        "/fullstride/tracking": "vo-fullstride-tracking",
        "/fullstride/cache": "vo-fullstride-cache",
    }
    assert (function.module_name, function.implementation_name) == ("fullstride.launch.modal_function", "attempt")
    created = api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING
    assert {request.object_creation_type for request in service.requests("VolumeGetOrCreate")} == {created}


def test_it_is_detached_and_called_once_without_waiting(service):
    plan(ModalRequest(), [*TRAIN, "run_name=a"]).submit()
    assert [request.app_state for request in service.requests("AppCreate")] == [api_pb2.APP_STATE_DETACHED]
    (call,) = service.requests("FunctionMap")
    assert call.function_call_invocation_type == api_pb2.FUNCTION_CALL_INVOCATION_TYPE_ASYNC
    _, given = pickle.loads(call.pipelined_inputs[0].input.args)
    assert given.pop("launch").startswith("a-")
    assert given == {"words": [*TRAIN, "run_name=a"], "volume": "fullstride-runs", "processes": 1, "seconds": 42900.0}


def test_without_detaching_it_is_waited_for_and_its_exit_code_is_ours(service):
    service.returned = 12
    assert plan(ModalRequest(detach=False), TRAIN).submit() == 12
    assert [request.app_state for request in service.requests("AppCreate")] == [api_pb2.APP_STATE_EPHEMERAL]


def test_the_image_holds_this_package_and_the_versions_that_are_here(service):
    plan(ModalRequest(pip=("einops==0.8.0",)), [*TRAIN, "track=trackio"]).submit()
    files = {file for request in service.requests("MountGetOrCreate") for file in _paths(request)}
    package = Path(fullstride.__file__).parent
    there = {f"/root/fullstride/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    assert there <= files
    assert any(path.endswith(".cu") for path in files) == any(package.rglob("*.cu"))
    assert not any("__pycache__" in path for path in files)
    commands = " ".join(
        line for request in service.requests("ImageGetOrCreate") for line in request.image.dockerfile_commands
    )
    for name in ("scikit-learn", "torchdiffeq", "trackio"):
        from importlib.metadata import version

        assert f"{name}=={version(name)}" in commands
    assert "torch==" in commands
    assert "+cpu" not in commands
    assert "einops==0.8.0" in commands
    assert "jax==" not in commands


def test_a_benchmark_takes_its_folder_along(service):
    words = ["benchmarks", "jvp-norms", "--out", "runs/results"]
    made = plan(ModalRequest(), words)
    root = Path(fullstride.__file__).parents[1]
    assert f"{root / 'fullstride'} at /root/fullstride, {root / 'benchmarks'} at /root/benchmarks" in made.text
    made.submit()
    files = {file for request in service.requests("MountGetOrCreate") for file in _paths(request)}
    assert {"/root/benchmarks/__main__.py", "/root/benchmarks/cases/jvp/norms.py"} <= files
    assert "/root/fullstride/errors.py" in files


def _paths(request: Any) -> list[str]:
    return [file.filename for file in request.files]


def test_what_was_asked_for_reaches_the_service(service):
    service.volumes["mine"] = Path()
    request = ModalRequest(
        name="mine", retries=2, retry_delay=45.0, time=1.5, gpus=4, gpu="H100", cpus=6, memory=32.0,
        image="nvcr.io/nvidia/pytorch:25.01-py3", volume=("mine:/data",), runs="other-runs", secret=("s",),
    )  # fmt: skip
    plan(request, [*TRAIN, "data.path=/data/x", "output_dir=/data/runs"]).submit()
    function = sent(service)
    assert function.timeout_secs == 5400
    assert (function.retry_policy.retries, function.retry_policy.initial_delay_ms) == (2, 45_000)
    resources = function.resources
    assert (resources.gpu_config.gpu_type, resources.gpu_config.count) == ("H100", 4)
    assert (resources.milli_cpu, resources.memory_mb) == (6000, 32 * 1024)
    assert {mount.mount_path: mount.volume_id for mount in function.volume_mounts}.items() >= {
        ("/data", "vo-mine"),
        ("/fullstride/runs", "vo-other-runs"),
    }
    assert [secret.deployment_name for secret in service.requests("SecretGetOrCreate")] == ["s"]
    lines = [line for request in service.requests("ImageGetOrCreate") for line in request.image.dockerfile_commands]
    assert "FROM nvcr.io/nvidia/pytorch:25.01-py3" in lines
    _, given = pickle.loads(service.requests("FunctionMap")[0].pipelined_inputs[0].input.args)
    assert (given["processes"], given["volume"], given["seconds"]) == (4, "other-runs", 5100.0)


def test_a_sweep_is_an_app_a_run(service, monkeypatch):
    monkeypatch.setattr(modal_app, "runs_of", lambda words: [[*words[:2], f"seed={seed}"] for seed in (0, 1)])
    plan(ModalRequest(gpus=0), ["meanflow", "train", "-m", "seed=0,1"]).submit()
    given = [pickle.loads(call.pipelined_inputs[0].input.args)[1] for call in service.requests("FunctionMap")]
    assert [each["words"][2] for each in given] == ["seed=0", "seed=1"]
    assert len({each["launch"] for each in given}) == 2
    assert len(service.requests("AppCreate")) == 2


def test_the_shown_plan_is_what_the_objects_are_made_of_and_nothing_is_sent(service):
    spec = spec_of(ModalRequest(), TRAIN)
    app, function = app_of(spec)
    assert isinstance(app, modal.App)
    assert isinstance(function, modal.Function)
    text = plan(ModalRequest(), TRAIN).text
    for part in ("function timeout: 43200", "'max_retries': 5", "'initial_delay': 30.0", "volume fullstride-runs at"):
        assert part in text
    assert f"image python: {sys.version_info.major}.{sys.version_info.minor}" in text
    assert service.calls == []


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        ({"time": 25.0}, [], "--time 25: expected hours above 0, 24 at most"),
        ({"time": 0.0}, [], "--time 0: expected"),
        ({"volume": ("data",)}, [], "--volume data: expected NAME:/PATH"),
        ({"volume": ("a:/fullstride/runs",)}, [], "a path that no other volume has"),
        ({}, ["output_dir=elsewhere"], "it would end with the container"),
        (
            {},
            ["data.path=pictures"],
            "data.path=pictures: a path of this machine does not exist there; put it on a volume",
        ),
        ({"retry_delay": 90.0}, [], "modal: Invalid initial_delay argument: 90"),
        ({"gpus": 2}, ["distributed=none"], "expected distributed=ddp"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(service, options, words, message):
    with pytest.raises(ConfigError, match=message):
        plan(ModalRequest(**options), [*TRAIN, *words])
    assert service.calls == []


def test_the_service_may_refuse(service):
    service.volumes.clear()
    service._FunctionCreate, kept = _denied, service._FunctionCreate
    try:
        with pytest.raises(ConfigError, match="modal: this account has no GPU"):
            plan(ModalRequest(), TRAIN).submit()
    finally:
        service._FunctionCreate = kept


def _denied(_: Any) -> Any:
    import grpclib

    raise grpclib.GRPCError(grpclib.Status.PERMISSION_DENIED, "this account has no GPU")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A container of this machine, whose commits are counted."""
    commits: list[str] = []
    monkeypatch.setattr(modal_function, "RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(modal_function, "WORK", str(tmp_path))
    monkeypatch.setattr(modal_function, "_commit", commits.append)
    (tmp_path / "record").mkdir()
    return tmp_path, commits


def run_here(here, monkeypatch, *ends: str, launch: str = "a-1", seconds: float = 0.0) -> int:
    folder, _ = here
    make = ending(folder / "record", *ends)
    monkeypatch.setattr(modal_function, "torchrun_command", lambda words, **_: make(words))
    return attempt(TRAIN, launch, "v", 1, seconds)


def test_a_failed_attempt_raises_so_that_modal_makes_the_next_which_goes_on(here, monkeypatch):
    for _ in range(2):
        with pytest.raises(AttemptFailed, match="exit code 75: stuck, and ended by its watchdog"):
            run_here(here, monkeypatch, "75", "75", "0", "0")
    assert run_here(here, monkeypatch, "75", "75", "0", "0") == 0
    assert run_here(here, monkeypatch, "0", launch="b-1") == 0
    resumed = [*TRAIN, "resume=true"]
    assert attempts_in(here[0] / "record") == [TRAIN, resumed, resumed, TRAIN]
    assert here[1] == ["v"] * 4


def test_what_would_fail_the_same_is_returned_and_not_raised(here, monkeypatch):
    assert run_here(here, monkeypatch, "12") == 12


def test_an_attempt_saves_before_modal_kills_it(here, monkeypatch):
    with pytest.raises(AttemptFailed, match="h is over"):
        run_here(here, monkeypatch, "saves", seconds=1.0)


def test_a_container_that_is_taken_away_lets_the_run_save(here, monkeypatch):
    class Taken(BaseException):
        pass

    def wait(self, seconds):
        while not (here[0] / "record" / "ready").exists():
            pass
        raise Taken

    ended: list[float] = []
    end = modal_function.Attempt.end
    monkeypatch.setattr(modal_function.Attempt, "wait", wait)
    monkeypatch.setattr(
        modal_function.Attempt, "end", lambda self, s: (ended.append(s), end(self, s), self._process.wait())
    )
    with pytest.raises(Taken):
        run_here(here, monkeypatch, "saves")
    assert ended == [modal_function.LEAVING]


def test_the_paths_of_a_container_agree():
    assert Path(container.RUNS) == Path(container.WORK, "runs")
    assert container.ENVIRONMENT["TRACKIO_DIR"] == container.TRACKING
    assert container.ENVIRONMENT["FULLSTRIDE_CACHE"] == container.CACHE
