import importlib
import random
import sys

import pytest

from benchmarks.harness.code_digest import PACKAGE, digest, digest_of, joined, loaded

CODE = '''"""What it is."""

import os  # for names


class A:
    """Doc, with a "# no comment" in it."""

    def f(self, x):
        """Doc
        of two lines."""
        return x + 1, "# ä is text", f"{x!r}"  # ä
'''


def test_comments_docstrings_and_blank_lines_do_not_count():
    other = CODE.replace("What it is.", "Something else.\n\nLonger.").replace("  # for names", "").replace("  # ä", "")
    other = other.replace('        """Doc\n        of two lines."""\n', "").replace("import os", "# new\n\nimport os")
    assert digest(other, ".py") == digest(CODE, ".py")


def test_imports_of_the_projects_own_files_do_not_count():
    own = CODE.replace("import os", "import os\nfrom fullstride.a import (\n    b,\n    c,\n)\nimport benchmarks.d")
    lazy = own.replace("        return", "        from fullstride.x import y\n        return")
    assert digest(lazy, ".py") == digest(own, ".py") == digest(CODE, ".py")
    assert digest(CODE.replace("import os", "import os, fullstride"), ".py") != digest(CODE, ".py")
    assert digest(CODE.replace("import os", "import fullstrides\nimport os"), ".py") != digest(CODE, ".py")


CHANGES = {"x + 1": "x + 2", "# ä is text": "# other text", "import os": "import re", "f(self, x)": "f(self, y)"}


@pytest.mark.parametrize(("old", "new"), CHANGES.items())
def test_code_counts(old, new):
    assert old in CODE
    assert digest(CODE.replace(old, new), ".py") != digest(CODE, ".py")


@pytest.mark.parametrize("mark", ["\x0c", "\x85", "\u2028"])
def test_only_a_line_feed_ends_a_line(mark):
    code = f'sep = "{mark}"\n\n\ndef f(x=1):\n    """Documented at length."""\n    return x  # why\n'
    assert digest(code.replace("x=1", "x=2"), ".py") != digest(code, ".py")
    assert digest(code.replace("at length", "in short").replace("why", "not"), ".py") == digest(code, ".py")


def test_kernels_are_read_as_c():
    code = "int a = 1; // one\n/* two\nlines */ int b;\n"
    assert digest(code, ".cu") == digest("int a = 1; // other\n\n  \n int b;\n", ".cu")
    assert digest(code.replace("1", "2"), ".cu") != digest(code, ".cu")


def test_a_text_of_c_has_no_comments():
    code = """char q = '"'; const char* at = "http://a"; // "one\nconst char* all = "/*"; int b = 1; /* two */\n"""
    for old, new in (("//a", "//b"), ("b = 1", "b = 2"), ('"/*"', '"/+"')):
        assert digest(code.replace(old, new), ".cu") != digest(code, ".cu")
    assert digest(code.replace('"one', "other").replace("two", "2"), ".cu") == digest(code, ".cu")


def test_what_is_no_python_is_taken_as_it_is():
    broken = f"def (:\n  # {random.random()}\n"
    assert digest(broken, ".py") == digest(f"\n{broken}", ".py")
    assert digest(broken, ".py") != digest(broken.replace("def", "deg"), ".py")


def test_loaded_files_are_the_packages_and_every_kernel(tmp_path):
    found = loaded()
    assert found["benchmarks/harness/code_digest.py"] == digest_of(PACKAGE.parent / "benchmarks/harness/code_digest.py")
    assert "fullstride/llm/kernels/cuda/token.cu" in found
    assert all(name.startswith(("fullstride/", "benchmarks/")) for name in found)
    names = {m.replace(".", "/") for m in sys.modules if m.startswith(("fullstride", "benchmarks"))}
    assert {name.removesuffix(".py").removesuffix("/__init__") for name in found if name.endswith(".py")} <= names
    assert digest_of(tmp_path / "nothing.py") is None


def test_what_older_code_has_trained_is_known_to_be_of_older_code():
    here, never = "benchmarks/harness/code_digest.py", "fullstride/never_loaded.py"
    found = joined([{here: "older", never: "gone"}, {here: loaded()[here]}])
    assert (found[here], found[never]) == ("older", "gone")
    assert joined([{here: loaded()[here]}, {here: "older"}])[here] == "older"
    assert joined([{}]) == loaded()


def test_what_is_declared_beside_loaded_code_is_part_of_it():
    importlib.import_module("benchmarks.cases.jvp.shapes")
    found = loaded()
    assert found["benchmarks/cases/jvp/shapes.toml"] == digest_of(PACKAGE.parent / "benchmarks/cases/jvp/shapes.toml")
