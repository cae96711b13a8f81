#!/usr/bin/python3
"""The rig's way into the guest: JSON lines over a virtio serial port.

The host sends {"id", "argv", "timeout", "stdin" (base64), "cwd"} and gets {"id", "rc", "out", "err"
(base64 both), "secs"}. Each command runs in a thread of its own, so that a watcher can run beside
an action, and in a session of its own, so that a time-out ends its children too.

With "socket" instead of "argv" it is a message to that unix socket, and "out" what is answered
until the other side hangs up: no program has to start for it, which would take half a second.
"""

import base64
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

PORT = "/dev/virtio-ports/cdi.rig"
FAILED = 1
TIMED_OUT = 124
COULD_NOT_START = 127

write_lock = threading.Lock()


def send(port: int, message: dict[str, object]) -> None:
    data = json.dumps(message).encode() + b"\n"
    with write_lock:
        while data:
            data = data[os.write(port, data) :]


def execute(request: dict[str, Any]) -> tuple[int, bytes, bytes]:
    """Run a command; its exit code and what it said."""
    try:
        child = subprocess.Popen(
            request["argv"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=request.get("cwd") or "/root",
            start_new_session=True,
        )
    except OSError as error:
        return COULD_NOT_START, b"", str(error).encode()
    given = base64.b64decode(request.get("stdin") or "")
    try:
        out, err = child.communicate(given, timeout=request["timeout"])
        return child.returncode, out, err
    except subprocess.TimeoutExpired as error:
        os.killpg(child.pid, signal.SIGKILL)
        return TIMED_OUT, error.stdout or b"", (error.stderr or b"") + b"\n[timed out]"


def exchange(request: dict[str, Any]) -> tuple[int, bytes, bytes]:
    """Send a message to a unix socket; as a command that prints the answer."""
    pieces = []
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(request["timeout"])
            sock.connect(request["socket"])
            sock.sendall(base64.b64decode(request["stdin"]))
            while piece := sock.recv(1 << 16):
                pieces.append(piece)
    except OSError as error:
        return FAILED, b"".join(pieces), str(error).encode()
    return 0, b"".join(pieces), b""


def answer(port: int, request: dict[str, Any]) -> None:
    began = time.monotonic()
    rc, out, err = exchange(request) if "socket" in request else execute(request)
    send(
        port,
        {
            "id": request["id"],
            "rc": rc,
            "out": base64.b64encode(out).decode(),
            "err": base64.b64encode(err).decode(),
            "secs": round(time.monotonic() - began, 4),
        },
    )


def lines(port: int) -> Iterator[bytes]:
    pieces: list[bytes] = []  # a file comes in thousands of them: none is copied twice
    while True:
        chunk = os.read(port, 1 << 16)
        if not chunk:  # the host has hung up, and may call again
            pieces.clear()
            time.sleep(0.05)
            continue
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join((*pieces, end))
            pieces.clear()
        pieces.append(rest)


def main() -> None:
    while not os.path.exists(PORT):
        time.sleep(0.05)
    port = os.open(PORT, os.O_RDWR)
    for line in lines(port):
        try:
            request = json.loads(line)
        except ValueError:
            continue  # cut off by a hang-up
        if "ping" in request:
            send(port, {"id": request["id"], "pong": True})
        else:
            threading.Thread(target=answer, args=(port, request), daemon=True).start()


if __name__ == "__main__":
    main()
