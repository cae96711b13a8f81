"""What others may have touched is read without waiting for anybody."""

import io
from pathlib import Path

import pytest

from agent.host import files


class Silent(io.FileIO):
    """A file that has nothing to read yet, as /proc/kmsg when the kernel has said nothing new."""

    def readinto(self, _buffer: object) -> None:
        """Nothing, and not the end either: EAGAIN."""


def test_a_regular_file_that_one_would_have_to_wait_for_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kmsg"
    path.touch()
    monkeypatch.setattr(
        files, "open", lambda fd, _mode: io.BufferedReader(Silent(fd)), raising=False
    )
    with pytest.raises(OSError, match="nothing to read at the moment"):
        files.read_regular(str(path), 100)
