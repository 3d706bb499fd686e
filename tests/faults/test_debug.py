"""`paramserve debug` of a served cluster, into which secrets were planted."""

from __future__ import annotations

import importlib
import json
import re
import signal
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from deploy.certificates import make_certificates
from tests.faults.servers import Servers, new_token

import paramserve as ps
from paramserve.cli import cli
from paramserve.errors import UnknownName

debug: Any = importlib.import_module("paramserve.cli.debug")
"""The module: the package's name `debug` is the command."""


def test_debug_collects_each_role_without_secrets_and_says_who_is_silent(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = make_certificates(tmp_path / "tls")
    files = (tls.certificate, tls.key, tls.authority)
    (_, second), address = servers.pair(workers=1, tls=files)
    token = Path(servers.token).read_text()
    with ps.connect(address, rank=0, token_file=servers.token, tls=tls) as worker:
        worker.client.define("w", np.zeros(3), rule=ps.Add())
        with pytest.raises(UnknownName):  # whose text holds the token
            worker.client.pull(token)

        def call(out: str, token_file: str = servers.token) -> tuple[int, str]:
            options = ["--token-file", token_file, "--out", str(tmp_path / out)]
            named = ("certificate", "key", "authority")
            for name, path in zip(named, files, strict=True):
                options += [f"--tls-{name}", path]
            done = CliRunner().invoke(cli, ["debug", address, *options])
            return done.exit_code, done.output

        status, told = call("a.zip")
        assert status == 0, told
        status, told = call("a.zip")
        assert (status, "nothing is overwritten" in told) == (2, True)
        assert call("never", new_token(tmp_path / "wrong"))[0] == 1
        assert not (tmp_path / "never").exists()
        monkeypatch.setattr(debug, "ANSWER_S", 1.0)
        second.signal(signal.SIGSTOP)
        status, told = call("folder")
        second.signal(signal.SIGCONT)
        assert (status, "no answer from server-1" in told) == (1, True)

    assert stat.S_IMODE((tmp_path / "a.zip").stat().st_mode) == 0o600
    with zipfile.ZipFile(tmp_path / "a.zip") as packed:
        found = {Path(name).name: packed.read(name).decode() for name in packed.namelist()}
    roles = ("coordinator", "server-0", "server-1")
    parts = ("config.json", "log.jsonl", "stacks.txt")
    expected = {"about.json", "status.json", *(f"{r}.{p}" for r in roles for p in parts)}
    assert set(found) == expected
    key = "".join(re.findall(r"^[A-Za-z0-9+/=]{20,}$", Path(tls.key).read_text(), re.MULTILINE))
    for name, text in found.items():
        assert token not in text, name
        assert key[:40] not in text, name
    about = json.loads(found["about.json"])
    assert abs(about["server-1"]["clock"]) < 5.0
    assert about["coordinator"]["versions"]["paramserve"]
    lines = [json.loads(line) for line in found["coordinator.log.jsonl"].splitlines()]
    events = {line["event"]: line["message"] for line in lines}
    assert {"serving", "servers-complete", "worker-joined", "request-refused"} <= set(events)
    assert "no parameter is named '[secret]'" in events["request-refused"]
    debug_lines = found["server-1.log.jsonl"]
    assert '"debug"' in debug_lines, "what the log leaves out"
    assert json.loads(found["server-1.config.json"])["shard"] == 1
    assert json.loads(found["status.json"])["state"] == "running"
    left = {path.name for path in (tmp_path / "folder").iterdir()}
    assert left == (expected - {f"server-1.{part}" for part in parts}) | {"server-1.failed.txt"}
