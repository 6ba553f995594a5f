import gguf
import numpy as np
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.weights import load
from fullstride.llm.weights.gguf_file import KINDS, NOT_SUPPORTED, open_gguf
from tests.llm import tiny
from tests.llm.gguf_files import write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", tiny.make_model("llama", 0))


def test_every_field_and_tensor_is_read_as_the_gguf_package_reads_it(tmp_path, seed):
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -30_000)
    writer.add_int32("a.i32", -(2**31))
    writer.add_uint64("a.u64", 2**63)
    writer.add_int64("a.i64", -(2**62))
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "東京 \n")
    writer.add_array("a.texts", ["", "x", "é" * 100])
    writer.add_array("a.numbers", rng.integers(-9, 9, 5).tolist())
    writer.add_array("a.flags", [True, False])
    writer.add_custom_alignment(64)
    for i in range(4):
        writer.add_tensor(f"t{i}", rng.normal(size=rng.integers(1, 5, i + 1)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = open_gguf(tmp_path / "all.gguf"), gguf.GGUFReader(tmp_path / "all.gguf")
    fields = {k: field.contents() for k, field in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    for tensor in theirs.tensors:
        packed = ours.tensors[tensor.name]
        assert packed.shape == tensor.data.shape
        np.testing.assert_array_equal(packed.data.view(np.float32).reshape(packed.shape), tensor.data)


def test_a_file_cut_anywhere_is_refused(file, tmp_path, seed):
    content = file.read_bytes()
    for size in [0, 3, 4, 10, len(content) - 1, *np.random.default_rng(seed).integers(0, len(content), 40)]:
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(ConfigError, match="cut short|not a GGUF file"):
            open_gguf(tmp_path / "cut.gguf")


def test_damage_is_either_refused_or_harmless(file, tmp_path, seed):
    """Noise in the header ends in one line for the user, and in no other error."""
    rng = np.random.default_rng(seed)
    clean = file.read_bytes()
    header = min(len(clean), 14_000)
    refused = 0
    for at in rng.integers(0, header, 60):
        content = bytearray(clean)
        content[at] ^= int(rng.integers(1, 256))
        (tmp_path / "noise.gguf").write_bytes(content)
        try:
            load(tmp_path / "noise.gguf")
        except ConfigError:
            refused += 1
    assert 0 < refused < 60


@pytest.mark.parametrize("count", [2**31, 2**60])
def test_a_count_that_is_noise_fills_no_memory(tmp_path, count):
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    key = (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little")
    for kind in (4, 8, 9):
        array = kind.to_bytes(4, "little") + count.to_bytes(8, "little")
        (tmp_path / "large.gguf").write_bytes(head + key + array + bytes(64))
        with pytest.raises(ConfigError, match="damaged or cut short"):
            open_gguf(tmp_path / "large.gguf")


def test_other_versions_and_kinds_of_numbers(file, tmp_path):
    content = file.read_bytes()
    (tmp_path / "old.gguf").write_bytes(content[:4] + (1).to_bytes(4, "little") + content[8:])
    with pytest.raises(ConfigError, match=r"GGUF version 1; expected one of \(2, 3\)"):
        open_gguf(tmp_path / "old.gguf")
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    writer.add_tensor("t", np.zeros((2, 66), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="t is of GGUF type IQ2_XXS; supported are F32, F16, Q4_0"):
        open_gguf(tmp_path / "odd.gguf")


def test_every_type_has_its_name():
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    ours = NOT_SUPPORTED | {number: kind.name for number, kind in KINDS.items()}
    assert known.items() <= ours.items()
    assert not NOT_SUPPORTED.keys() & KINDS.keys()
