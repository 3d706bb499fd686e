"""A network of hosts for each test; without what it takes, the tests are skipped and say so."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.network.hosts import Keeper, Network, missing


@pytest.fixture(scope="session")
def keeper() -> Iterator[Keeper]:
    why = missing()
    if why:
        pytest.skip(f"NOT TESTED: cut, lossy and slow networks: {why}")
    found = Keeper()
    yield found
    found.close()


@pytest.fixture
def network(keeper: Keeper, tmp_path: Path) -> Iterator[Network]:
    found = Network(keeper, tmp_path)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    return str(path)
