"""What `paramserve serve` says on stderr of those who come and go."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest

import paramserve as ps
from paramserve.errors import RankTaken
from paramserve.launch.serve import _Log
from paramserve.messages import Member, Members

COMMAND = (sys.executable, "-c", "import sys; from paramserve.cli import main; sys.exit(main())")


def test_serve_says_who_comes_is_refused_and_leaves(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    options = ("--bind", "127.0.0.1:0", "--token-file", str(token), "--workers", "1")
    with subprocess.Popen(
        [*COMMAND, "serve", *options, "--until-done"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().rpartition(" ")[2].strip()
            with ps.connect(address, rank=0, token_file=token), pytest.raises(RankTaken):
                ps.connect(address, rank=0, token_file=token)
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
    lines = [line.partition(" paramserve: ")[2] for line in told.splitlines()]
    assert lines[:2] == ["all 1 servers are there: workers may come", "rank 0 has come"]
    assert lines[2].startswith("refused: rank 0 is taken by a live worker")
    assert lines[3:] == ["rank 0 has left"]


def test_log_tells_deaths_returns_and_who_never_came(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paramserve")
    log = _Log(servers=1, workers=3)
    absent = Member(2, 0, 0, "expected")
    for number, (state, incarnation) in enumerate(
        [("live", 1), ("restarting", 1), ("live", 2), ("live", 2), ("dead", 2)]
    ):
        member = Member(1, 5, incarnation, state)
        log.on_members(Members(number, (Member(0, 4, 1, "live"), member, absent)))
    log.tell_missing()
    assert caplog.messages == [
        "rank 0 has come",
        "rank 1 has come",
        "rank 1 counts as dead, and may come again",
        "rank 1 has come (incarnation 2)",
        "rank 1 counts as dead (incarnation 2)",
        "not done yet. still there: 0; never came: 2",
    ]
