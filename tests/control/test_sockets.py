"""Addresses are parsed without guessing, and a socket is taken over only from the dead."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agent.control.sockets import (
    Address,
    TcpAddress,
    UnixAddress,
    bind,
    describe,
    parse_address,
    passed_sockets,
    unlink,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        pytest.param("127.0.0.1:9478", TcpAddress("127.0.0.1", 9478), id="ipv4"),
        pytest.param("[::1]:9478", TcpAddress("::1", 9478), id="ipv6"),
        pytest.param("[0:0::1]:1", TcpAddress("::1", 1), id="ipv6 in another spelling"),
        pytest.param("0.0.0.0:0", TcpAddress("0.0.0.0", 0), id="any port"),
        pytest.param("/run/x.sock", UnixAddress("/run/x.sock"), id="path"),
    ],
)
def test_an_address_is_read_and_written_back(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("9478", id="a port alone"),
        pytest.param(":9478", id="no host"),
        pytest.param("localhost:9478", id="a name"),
        pytest.param("::1:9478", id="ipv6 without brackets"),
        pytest.param("127.0.0.1:65536", id="port too high"),
        pytest.param("127.0.0.1:1234567", id="port much too high"),
        pytest.param("127.0.0.1:-1", id="negative"),
        pytest.param("127.0.0.1:٣", id="digits that are not ASCII"),
        pytest.param("127.0.0.1:", id="no port"),
        pytest.param("run/x.sock", id="relative path"),
        pytest.param("/" + "x" * 107, id="path too long for the kernel"),
        pytest.param("/run/\0x", id="NUL in a path"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"numeric address|socket's path"):
        parse_address(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_bound_and_described(host: str) -> None:
    with bind(TcpAddress(host, 0)) as listener:
        address = parse_address(describe(listener))
        assert isinstance(address, TcpAddress)
        assert address.host == host
        assert address.port > 0
        assert not listener.getblocking()
        assert not listener.get_inheritable()
        with pytest.raises(OSError, match="in use"):
            bind(address)


def test_a_port_is_free_again_right_after_a_connection_ended() -> None:
    """SO_REUSEADDR: the side that closes first keeps TIME_WAIT for a minute."""
    with bind(TcpAddress("127.0.0.1", 0)) as listener:
        address = parse_address(describe(listener))
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()) as client:
            accepted, _ = listener.accept()
            accepted.close()
            assert client.recv(1) == b""
    bind(address).close()


def test_a_dead_socket_is_taken_over_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bind(UnixAddress(str(path))) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert describe(listener) == str(path)
        with pytest.raises(OSError, match="in use"):
            bind(UnixAddress(str(path)))
    assert path.exists(), "closing leaves the path, as a kill does"
    with bind(UnixAddress(str(path))) as listener:
        unlink(listener)
    assert not path.exists()


def test_a_file_is_never_taken_for_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(OSError, match="in use"):
        bind(UnixAddress(str(path)))
    assert path.read_text() == "data"


def test_a_path_without_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        bind(UnixAddress(str(tmp_path / "no" / "s")))


def test_a_path_that_became_a_file_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bind(UnixAddress(str(path))) as listener:
        path.unlink()
        path.write_text("data")
        unlink(listener)
    assert path.read_text() == "data"


PASSED = """
import os, sys
from agent.control.sockets import describe, passed_sockets
environ = dict(os.environ, LISTEN_PID=sys.argv[1] or str(os.getpid()))
found = passed_sockets(environ)
for name, sockets in sorted(found.items()):
    for s in sockets:
        print(name, describe(s), s.get_inheritable(), s.getblocking())
print([name for name in environ if name.startswith("LISTEN_")])
"""


def run_with_passed(fds: list[int], names: str, pid: str = "", count: str = "") -> str:
    """What a process sees that got these descriptors from 3 on, as systemd hands them over."""
    shell = "".join(f"exec {3 + n}<&{fd}; " for n, fd in enumerate(fds))
    return subprocess.run(
        ["bash", "-c", shell + 'exec "$@"', "bash", sys.executable, "-c", PASSED, pid],
        pass_fds=fds,
        env={
            **os.environ,
            "LISTEN_FDS": count or str(len(fds)),
            "LISTEN_FDNAMES": names,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_sockets_of_systemd_are_found_by_name(tmp_path: Path) -> None:
    with bind(TcpAddress("127.0.0.1", 0)) as tcp, bind(UnixAddress(str(tmp_path / "s"))) as unix:
        # High numbers, so that moving one to 3 does not overwrite the next.
        fds = [os.dup2(tcp.fileno(), 103), os.dup2(unix.fileno(), 104)]
        try:
            output = run_with_passed(fds, "metrics:control")
            address = describe(tcp)
        finally:
            for fd in fds:
                os.close(fd)
    assert output.splitlines() == [
        f"control {tmp_path / 's'} False False",
        f"metrics {address} False False",
        "[]",
    ]


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="none"),
        pytest.param({"LISTEN_PID": "1", "LISTEN_FDS": "1"}, id="for another process"),
        pytest.param({"LISTEN_PID": "77", "LISTEN_FDS": "many"}, id="not a number"),
        pytest.param({"LISTEN_PID": "77", "LISTEN_FDS": "0"}, id="zero"),
        pytest.param({"LISTEN_FDS": "1"}, id="for nobody"),
    ],
)
def test_what_is_not_for_us_is_left(environ: dict[str, str]) -> None:
    assert passed_sockets(environ, pid=77) == {}
    assert environ == {}, "and no child is told of it"


def test_a_descriptor_that_is_no_socket_is_skipped() -> None:
    with open("/dev/null") as file:
        fd = os.dup2(file.fileno(), 103)
        try:
            assert run_with_passed([fd], "metrics", count="2") == "[]\n"
        finally:
            os.close(fd)


def test_a_group_that_does_not_exist_is_told_as_any_other_obstacle(tmp_path: Path) -> None:
    address = UnixAddress(str(tmp_path / "sock"), "no-such-group")
    with pytest.raises(OSError, match="there is no group no-such-group"):
        bind(address)
