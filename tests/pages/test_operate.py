"""The unit, the container file and the proxy of the page for operators are what their programs take."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.pages.test_commands import _parsed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "operate.md"
UNIT, CONTAINER, PROXY = re.findall(r"```(?:ini|dockerfile|nginx)\n(.*?)```", PAGE.read_text(), re.DOTALL)
BUILDER = next(filter(shutil.which, ("podman", "docker")), None)


def test_the_commands_of_the_unit_and_the_container_are_understood():
    line = re.search(r"^ExecStart=/opt/fullstride/bin/fullstride (.*)$", UNIT, re.MULTILINE)
    assert line is not None
    assert _parsed(shlex.split(line[1]))[1]["name"] == ["qwen3"]
    words = json.loads(CONTAINER.splitlines()[-1].removeprefix("CMD "))
    assert _parsed(words)[1]["host"] == "0.0.0.0"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd")
def test_systemd_takes_the_unit(tmp_path):
    path = tmp_path / "fullstride-llm.service"
    path.write_text(re.sub(r"/opt/fullstride/bin/fullstride", shutil.which("true") or "", UNIT))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if path.name in line] == []


@pytest.mark.skipif(not shutil.which("nginx"), reason="no nginx")
def test_nginx_takes_the_proxy(tmp_path):
    key, certificate = tmp_path / "llm.key", tmp_path / "llm.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=llm", "-keyout", key]
    subprocess.run([*made, "-out", certificate], check=True, capture_output=True)
    server = PROXY.replace("/etc/ssl/", f"{tmp_path}/").replace("443", "8443")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    logs = "access_log off; " + " ".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid; events {{}} http {{ {logs}\n{server} }}")
    command = ["nginx", "-t", "-e", tmp_path / "log", "-c", tmp_path / "nginx.conf"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.release
@pytest.mark.skipif(BUILDER is None, reason="no builder of containers")
def test_the_container_is_built_and_runs(tmp_path):
    (tmp_path / "Containerfile").write_text(CONTAINER)
    build = [str(BUILDER), "build", "-t", "fullstride-test", "-f", str(tmp_path / "Containerfile"), str(ROOT)]
    subprocess.run(build, check=True)
    done = subprocess.run([str(BUILDER), "run", "--rm", "fullstride-test", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("fullstride ")
