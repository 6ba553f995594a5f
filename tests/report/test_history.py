import subprocess

import pytest

from fullstride.report.history import PACKAGE, History, repository
from fullstride.report.overview import CASES
from fullstride.report.page import render
from fullstride.report.reading import read_folder
from tests.report.made import write_all
from tests.report.markup import Page


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


@pytest.fixture
def root(tmp_path):
    _git(tmp_path, "init", "-q")
    return tmp_path


def test_a_result_is_stale_once_its_own_code_has_changed(root):
    first = _commit(root, "code/a.py", "1")
    _commit(root, "elsewhere.py", "2")
    assert History(root).freshness(first, ("code",)).status == "current"
    last = _commit(root, "code/a.py", "3")
    found = History(root).freshness(first, ("code",))
    assert found.status == "stale"
    assert found.why == f"1 later change, last {last[:7]}"
    assert History(root).freshness(last, ("code",)).status == "current"
    assert History(root).freshness(first, ("code", ":(exclude)code/a*")).status == "current"


@pytest.mark.parametrize("commit", [None, "", "0" * 40, "--all", "HEAD", "not a commit"])
def test_a_commit_that_is_not_there_says_so(root, commit):
    _commit(root, "code/a.py", "1")
    assert History(root).freshness(commit, ("code",)).status == "unknown"


def test_without_a_repository_nothing_is_known(tmp_path):
    for history in (History(None), History(tmp_path)):
        assert str(history.freshness("0" * 40, ("code",))) == "unknown: no git repository here"


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
        "jvp-norms": "stale",
        "jvp-attention": "current",
        "train-step": "current",
        "llm": "current",
        "meanflow-loader": "current",
        "something-new": "stale",  # nothing is known of it: any change counts
    }


def test_the_paths_of_every_case_exist():
    paths = {path for case in CASES for path in case.paths if not path.startswith(":")}
    assert paths
    assert [path for path in sorted(paths) if not (PACKAGE.parent / path).exists()] == []
