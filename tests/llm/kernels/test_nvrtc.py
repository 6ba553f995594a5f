"""Caching of compiled kernels, tested with a fake compiler that counts."""

import ctypes

import pytest

from fullstride.llm.kernels.cuda import nvrtc


class Compiler(ctypes.CDLL):
    """Answers with the source in capitals."""

    def __init__(self, version: tuple[int, int] = (13, 0)):
        self.version, self.compiled = version, 0

    def nvrtcVersion(self, major, minor) -> int:  # noqa: N802
        major._obj.value, minor._obj.value = self.version
        return 0

    def nvrtcCreateProgram(self, program, source, name, count, headers, names) -> int:  # noqa: N802
        self.text = source.decode().upper()
        return 0

    def nvrtcCompileProgram(self, program, count, options) -> int:  # noqa: N802
        self.compiled += 1
        return 0

    def nvrtcGetPTXSize(self, program, size) -> int:  # noqa: N802
        size._obj.value = len(self.text) + 1
        return 0

    def nvrtcGetPTX(self, program, buffer) -> int:  # noqa: N802
        buffer.value = self.text.encode()
        return 0

    def nvrtcDestroyProgram(self, program) -> int:  # noqa: N802
        return 0


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Start as a new process would, with the given compiler."""
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(tmp_path / "cache"))

    def begin(compiler: Compiler) -> Compiler:
        nvrtc.ptx.cache_clear()
        monkeypatch.setattr(nvrtc, "library", lambda: compiler)
        return compiler

    yield begin
    nvrtc.ptx.cache_clear()


def test_another_process_compiles_only_what_is_new(process):
    first = process(Compiler())
    assert nvrtc.ptx("kernel a", "a.cu", "80") == nvrtc.ptx("kernel a", "a.cu", "80") == "KERNEL A"
    assert first.compiled == 1
    second = process(Compiler())
    assert nvrtc.ptx("kernel a", "a.cu", "80") == "KERNEL A"
    assert second.compiled == 0
    assert nvrtc.ptx("kernel b", "a.cu", "80") == "KERNEL B"
    assert second.compiled == 1


def test_another_compiler_or_other_options_compile_anew(process, monkeypatch):
    first = process(Compiler())
    nvrtc.ptx("kernel a", "a.cu", "90a")
    assert first.compiled == 1
    nvrtc.ptx("kernel a", "a.cu", "80")
    newer = process(Compiler((13, 1)))
    nvrtc.ptx("kernel a", "a.cu", "80")
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--fmad=false"))
    nvrtc.ptx.cache_clear()
    nvrtc.ptx("kernel a", "a.cu", "80")
    assert newer.compiled == 2


def test_a_folder_that_cannot_be_written_is_told_of(process, tmp_path, capsys):
    (tmp_path / "cache").write_text("a file")
    compiler = process(Compiler())
    assert nvrtc.ptx("kernel a", "a.cu", "80") == "KERNEL A"
    assert compiler.compiled == 1
    said = capsys.readouterr()
    assert "not cached" in said.out + said.err
