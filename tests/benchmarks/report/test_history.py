import subprocess

import pytest

from benchmarks.report import experiments
from benchmarks.report.history import MOVES, PACKAGE, History, covers, repository
from benchmarks.report.overview import CASES
from benchmarks.report.page import render
from benchmarks.report.reading import Source, read_folder
from fullstride.measure.code_digest import digest
from tests.benchmarks.report.made import write_all
from tests.benchmarks.report.markup import Page


def _git(root, *arguments):
    name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(("git", *name, *arguments), cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _commit(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    _git(root, "add", ".")
    _git(root, "commit", "-m", text)
    return _git(root, "rev-parse", "HEAD")


def _source(commit, dirty=False, code=None, name="r.json"):
    return Source(name, {"environment": {"commit": commit, "dirty": dirty, "code": code}})


def _status(root, source, *paths):
    return History(root, root / "fullstride").freshness(source, paths or ("code",)).status


@pytest.fixture
def root(tmp_path):
    _git(tmp_path, "init", "-q")
    return tmp_path


def test_a_result_is_stale_once_its_own_code_is_another_one(root):
    first = _commit(root, "code/a.py", "x = 1\n")
    _commit(root, "elsewhere.py", "y = 1\n")
    assert _status(root, _source(first)) == "current"
    last = _commit(root, "code/a.py", "x = 2\n")
    found = History(root).freshness(_source(first), ("code",))
    assert str(found) == "stale: the code of a.py is another one now"
    assert _status(root, _source(last)) == "current"
    assert _status(root, _source(first), "code", ":(exclude)code/a*") == "current"


def test_words_about_the_code_change_nothing(root):
    first = _commit(root, "code/a.py", '"""One."""\n\nx = 1  # a\n')
    _commit(root, "code/a.py", '"""Two."""\nx = 1\n')
    assert _status(root, _source(first)) == "current"
    _commit(root, "code/b.py", "z = 3\n")
    assert _status(root, _source(first)) == "stale"


@pytest.mark.parametrize("recorded", [True, False])
def test_a_move_changes_nothing(root, recorded):
    old = "from fullstride.b import (\n    c,\n)\nimport os\n\nx = c + 1\n"
    commit = _commit(root, "fullstride/a.py", old)
    code = {"fullstride/a.py": digest(old, ".py")} if recorded else None
    new = "import os\n\nfrom fullstride.room.b import c\n\nx = c + 1\n"
    (root / "fullstride" / "a.py").unlink()
    moves = {"fullstride/a.py": "fullstride/room/a.py", "fullstride/b.py": "fullstride/room/b.py"}

    def status():
        return (
            History(root, root / "fullstride", moves).freshness(_source(commit, code=code), ("fullstride/room",)).status
        )

    _commit(root, "fullstride/room/a.py", new)
    assert status() == "current"
    _commit(root, "fullstride/room/a.py", new.replace("+ 1", "+ 2"))
    assert status() == "stale"
    (root / "fullstride" / "room" / "a.py").unlink()
    _commit(root, "c.py", "c")
    assert status() == "stale"


def test_digests_of_what_was_measured_are_preferred_to_the_commit(root):
    commit = _commit(root, "fullstride/a.py", "x = 1\n")
    kept = {"fullstride/a.py": digest("x = 1  # measured\n", ".py")}
    later = _source(commit, dirty=True, code=kept)
    assert _status(root, later, "fullstride") == "current"
    (root / "fullstride" / "a.py").write_text("x = 2\n")
    assert _status(root, later, "fullstride") == "stale"
    (root / "fullstride" / "a.py").unlink()
    assert _status(root, later, "fullstride") == "stale"
    assert _status(root, later, "elsewhere") == "unknown"


def test_changes_beside_the_commit_are_no_proof(root):
    first = _commit(root, "code/a.py", "x = 1\n")
    changed = _source(first, dirty=True)
    assert _status(root, changed) == "unknown"
    _commit(root, "code/a.py", "x = 2\n")  # what was measured, it may be
    assert _status(root, changed) == "stale"
    _commit(root, "results/r.json", "{}")  # the result comes with it
    assert _status(root, changed) == "unknown"
    _commit(root, "code/a.py", "x = 3\n")
    assert _status(root, changed) == "stale"


@pytest.mark.parametrize("commit", [None, "", "0" * 40, "--all", "HEAD", "not a commit"])
def test_a_commit_that_is_not_there_says_so(root, commit):
    _commit(root, "code/a.py", "1")
    assert _status(root, _source(commit)) == "unknown"


def test_without_a_repository_nothing_is_known(tmp_path):
    for history in (History(None), History(tmp_path)):
        assert str(history.freshness(_source("0" * 40), ("code",))) == "unknown: no git repository here"


@pytest.mark.parametrize(
    ("file", "covered"),
    [("a/b.py", True), ("a/b/c.py", True), ("ab/c.py", False), ("a/bench_x.py", False), ("one.py", True)],
)
def test_paths_are_gits(file, covered):
    assert covers(("a", "one.py", ":(exclude)a/bench_*"), file) is covered


def test_a_package_installed_inside_another_repository_has_none(root):
    installed = root / ".venv" / "lib" / "fullstride"
    installed.mkdir(parents=True)
    _commit(root, "a.py", "1")
    assert repository(installed) is None
    (root / "fullstride").mkdir()
    assert repository(root / "fullstride") == root


def test_the_page_marks_each_case_by_its_own_code(root, tmp_path_factory):
    first = _commit(root, "fullstride/llm/engine/engine.py", "1")
    _commit(root, "fullstride/jvp/norms/op.py", "2")
    folder = tmp_path_factory.mktemp("results")
    write_all(folder, commit=first)
    _, *rows = Page(render(read_folder(folder), History(root))[0]).tables[0]
    status = {row[0].partition(":")[0]: row[-1].split()[0] for row in rows}
    assert status == {
        "meanflow-step": "stale",  # norms are part of its networks
        "meanflow-peer": "stale",
        "jvp-norms": "stale",
        "jvp-attention": "current",
        "train-step": "current",
        "llm": "current",
        "meanflow-loader": "current",
        "meanflow-sampling": "stale",
        "something-new": "stale",  # nothing is known of it: any change counts
    }


# By case, what its times depend on besides what it is named for.
TIMED = {
    "meanflow-step": (
        "fullstride/jvp/norms/op.py",
        "fullstride/device/cuda_graph.py",
        "benchmarks/cases/meanflow/step_alternatives.py",
    ),
    "meanflow-scaling": (
        "fullstride/jvp/attention/op.py",
        "fullstride/meanflow/objective/derivative.py",
        "benchmarks/cases/meanflow/scaling_steps.py",
    ),
    "meanflow-peer": (
        "fullstride/jvp/norms/op.py",
        "fullstride/device/cuda_graph.py",
        "fullstride/meanflow/training/step.py",
        "fullstride/meanflow/data/edm_augment.py",
    ),
    "jvp-attention": (
        "benchmarks/cases/jvp/attention_ways.py",
        "fullstride/measure/timing.py",
        "fullstride/device/cuda_graph.py",
    ),
    "jvp-norms": ("benchmarks/cases/jvp/norms.py", "fullstride/measure/timing.py", "fullstride/device/cuda_graph.py"),
    "llm": (
        "benchmarks/cases/llm/sweep.py",
        "benchmarks/cases/llm/latency.py",
        "benchmarks/cases/llm/work.py",
        "fullstride/llm/server/request_manager.py",
        "fullstride/measure/roofline.py",
    ),
    "llm-serve": ("benchmarks/cases/llm/shared.py", "fullstride/measure/roofline.py"),
    "llm-hostile": (
        "benchmarks/cases/llm/attacks.py",
        "fullstride/llm/server/bodies.py",
        "fullstride/llm/text/confined.py",
        "fullstride/measure/roofline.py",
    ),
    "paged-attention": ("benchmarks/cases/llm/attention_work.py", "fullstride/measure/timing.py"),
    "meanflow-loader": ("benchmarks/cases/meanflow/loader.py", "fullstride/step/torch/transfer/prefetch.py"),
    "meanflow-sampling": (
        "fullstride/meanflow/sampling/graphed.py",
        "benchmarks/cases/meanflow/sampling_run.py",
        "fullstride/device/cuda_graph.py",
    ),
    "train-step": ("fullstride/bert/model/bert.py", "benchmarks/cases/bert/workload.py", "fullstride/measure/pairs.py"),
}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_case_is_stale_once_what_is_timed_or_how_is_changed(case):
    assert [file for file in TIMED[case.name] if not covers(case.paths, file)] == []


def test_an_experiment_is_stale_once_what_it_trains_or_times_is_changed():
    step = (
        "benchmarks/cases/step_jax/real.py",
        "benchmarks/cases/step_jax/ways.py",
        "fullstride/step/jax/train_step.py",
    )
    own = {
        experiments.BERT: (
            "fullstride/bert/model/bert.py",
            "benchmarks/experiments/bert/steps.py",
            "benchmarks/cases/bert/workload.py",
            *step,
        ),
        experiments.MEANFLOW: (
            "fullstride/meanflow/sampling/samplers.py",
            "fullstride/step/torch/body.py",
            "fullstride/jvp/norms/op.py",
            "fullstride/device/cuda_graph.py",
        ),
    }
    neither = (
        "fullstride/cli/meanflow.py",
        "fullstride/cli/bert.py",
        "benchmarks/cases/step_jax/tree.py",
        "benchmarks/cases/meanflow/step.py",
        "fullstride/cli/app.py",
    )
    for paths, files in own.items():
        found = [file for every in (*own.values(), neither) for file in every if covers(paths, file)]
        assert found == list(files)


def test_the_paths_of_every_case_exist():
    every = (*(case.paths for case in CASES), experiments.BERT, experiments.MEANFLOW)
    paths = {path for each in every for path in each if not path.startswith(":")}
    assert paths
    assert [path for path in sorted(paths) if not (PACKAGE.parent / path).exists()] == []


def test_what_moved_is_where_the_table_says_and_nothing_else_took_its_place():
    """A new file at an old path would be judged by the digests of the one that moved."""
    root = PACKAGE.parent
    assert len(MOVES) > 400
    assert [new for new in MOVES.values() if not (root / new).is_file()] == []
    assert [old for old in MOVES if (root / old).is_file()] == []
