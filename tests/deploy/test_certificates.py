"""Certificates serve both sides of a real handshake, and never replace others."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
import sys
from pathlib import Path

import pytest
from deploy.certificates import local_hosts, main, make_certificates
from tests.needs import needs

from deploy import certificates
from paramserve.config import TLS
from paramserve.errors import ParamServeError

needs("trustme")

FILES = {"ca.pem", "cert.pem", "key.pem"}


def context(purpose: int, show: TLS | None, trust: TLS) -> ssl.SSLContext:
    """As strict as ssl can be: TLS 1.3, both sides checked, RFC 5280 to the letter."""
    made = ssl.SSLContext(purpose)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.load_verify_locations(trust.authority)
    if show is not None:
        made.load_cert_chain(show.certificate, show.key)
    return made


def meet(server: TLS, client: TLS | None, host: str, *, trust: TLS | None = None) -> bytes:
    """Shake hands without sockets and send one message; what the client reads at the end."""
    trust = trust if trust is not None else server
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepting = context(ssl.PROTOCOL_TLS_SERVER, server, trust)
    dialling = context(ssl.PROTOCOL_TLS_CLIENT, client, trust)
    far = accepting.wrap_bio(up, down, server_side=True)
    near = dialling.wrap_bio(down, up, server_hostname=host)
    for side in (near, far, near, far):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    far.write(b"known" if far.getpeercert() else b"unknown")
    return near.read(16)


def test_make_certificates_new_folder_writes_three_files_for_their_owner_only(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "deep" / "tls"
    old = os.umask(0)
    try:
        tls = make_certificates(folder)
    finally:
        os.umask(old)
    assert tls == TLS(
        certificate=str(folder / "cert.pem"),
        key=str(folder / "key.pem"),
        authority=str(folder / "ca.pem"),
        check_host=True,
    )
    assert {path.name for path in folder.iterdir()} == FILES
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_make_certificates_default_hosts_serve_both_sides(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path)
    for host in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        assert meet(tls, tls, host) == b"known", host


def test_make_certificates_named_hosts_serve_those_only(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path, ["*.train.svc", "10.1.2.3"])
    for host in ("server-0.train.svc", "10.1.2.3"):
        assert meet(tls, tls, host) == b"known", host
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        meet(tls, tls, "localhost")


def test_make_certificates_client_without_certificate_is_refused(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path)
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        meet(tls, None, "localhost")


def test_make_certificates_client_of_another_set_is_refused(tmp_path: Path) -> None:
    ours, theirs = make_certificates(tmp_path / "a"), make_certificates(tmp_path / "b")
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        meet(ours, theirs, "localhost")


def test_make_certificates_ends_within_a_year(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path)
    decoded = ssl._ssl._test_decode_cert(tls.certificate)
    began = Path(tls.certificate).stat().st_mtime
    left_days = (ssl.cert_time_to_seconds(decoded["notAfter"]) - began) / 86_400
    assert 364 < left_days < 366


def test_make_certificates_file_is_there_changes_nothing(tmp_path: Path) -> None:
    for name in sorted(FILES):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ParamServeError, match=f"{name} is there already.*another folder"):
            make_certificates(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()


def test_make_certificates_dangling_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls" / "key.pem").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ParamServeError, match=r"key\.pem is there already"):
        make_certificates(tmp_path / "tls")
    assert not (tmp_path / "elsewhere").exists()


def test_make_certificates_folder_in_use_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(ParamServeError, match=r"open to others.*a new folder"):
        make_certificates(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_make_certificates_empty_folder_is_closed_to_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_certificates(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_make_certificates_machine_name_no_certificate_can_hold_goes_by_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "my_host")
    tls = make_certificates(tmp_path)
    assert meet(tls, tls, "127.0.0.1") == b"known"


def test_make_certificates_disk_full_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = os.open

    def full_at_the_key(path: Path, flags: int, mode: int) -> int:
        if path.name == "key.pem":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return honest(path, flags, mode)

    monkeypatch.setattr(certificates.os, "open", full_at_the_key)
    with pytest.raises(ParamServeError, match=r"No space left.*To fix"):
        make_certificates(tmp_path)
    assert not list(tmp_path.iterdir())


def test_make_certificates_file_comes_in_between_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = os.open

    def another_is_faster(path: Path, flags: int, mode: int) -> int:
        if path.name == "key.pem":
            path.write_text("theirs")
        return honest(path, flags, mode)

    monkeypatch.setattr(certificates.os, "open", another_is_faster)
    with pytest.raises(ParamServeError, match="File exists"):
        make_certificates(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["key.pem"]
    assert (tmp_path / "key.pem").read_text() == "theirs"


def test_make_certificates_without_trustme_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trustme", None)
    with pytest.raises(ParamServeError, match="pip install trustme"):
        make_certificates(tmp_path / "tls")
    assert not (tmp_path / "tls").exists()


def test_make_certificates_bad_hosts_are_refused_before_writing(tmp_path: Path) -> None:
    for hosts in ("localhost", [""], ["not a name"], ["*."], ["10.0.0.0/8"]):
        with pytest.raises(ValueError, match="host"):
            make_certificates(tmp_path / "tls", hosts)
        assert not (tmp_path / "tls").exists(), hosts


def test_local_hosts_loopback_comes_first_and_nothing_twice() -> None:
    found = local_hosts()
    assert found[:3] == ["localhost", "127.0.0.1", "::1"]
    assert socket.gethostname() in found
    assert len(found) == len(set(found))


def test_script_says_how_to_use_them_and_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path / "tls"), "--host", "localhost"]
    assert main(given) == 0
    told = capsys.readouterr().out
    for option, name in (("certificate", "cert"), ("key", "key"), ("authority", "ca")):
        assert f"--tls-{option} {tmp_path / 'tls' / name}.pem" in told
    assert main(given) == 1
    assert "is there already" in capsys.readouterr().err
