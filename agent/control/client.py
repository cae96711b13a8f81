"""Talks to a running agent over its control socket; for the command line. Blocks."""

import http.client
import json
import socket
from typing import Any, Final

from agent.errors import AgentError, ExitCode

TIMEOUT: Final = 150.0
"""Seconds; longer than the agent takes for anything but a kernel that hangs."""


class UnreachableError(AgentError):
    """No agent answers on the control socket."""

    code = "unreachable"
    retryable = True
    exit_code = ExitCode.UNAVAILABLE


class NotAllowedError(AgentError):
    """This user may not open the control socket."""

    code = "not-allowed"
    exit_code = ExitCode.NO_PERMISSION


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def call(path: str, method: str, route: str, body: object = None) -> tuple[int, dict[str, Any]]:
    """Ask a running agent for something.

    Args:
        path: Of the control socket.
        method: ``GET``, ``PUT``, ``DELETE`` or ``POST``.
        route: As ``/v1/status``.
        body: Sent as JSON.

    Returns:
        The status, and the document.

    Raises:
        UnreachableError: No agent answers there.
        NotAllowedError: This user may not ask.
    """
    connection = _Connection(path)
    is_connected = False
    try:
        connection.connect()
        is_connected = True
        content = None if body is None else json.dumps(body, ensure_ascii=False)
        connection.request(method, route, content and content.encode("utf-8", "replace"))
        response = connection.getresponse()
        document = json.loads(response.read())
    except PermissionError as error:
        raise NotAllowedError(
            f"{path} may not be opened by this user",
            hint="ask as root, or as a member of control.group",
        ) from error
    except TimeoutError as error:
        raise UnreachableError(f"the agent at {path} does not answer") from error
    except (ConnectionError, http.client.RemoteDisconnected) as error:
        if not is_connected:
            raise _no_agent(path, error) from error
        raise UnreachableError(
            f"the agent at {path} has closed the connection without an answer",
            hint="too many may wait for one, or it has just ended: ask again",
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _no_agent(path, error) from error
    finally:
        connection.close()
    return response.status, document


def _no_agent(path: str, error: Exception) -> UnreachableError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return UnreachableError(
        f"no agent answers at {path}: {reason}", hint="systemctl status cdi-agent"
    )
