"""With GOLDEN=write, every golden file is written before any test reads one."""

import os

import pytest

from tests.hosts import golden


@pytest.fixture(scope="session", autouse=True)
def _golden_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    if os.environ.get("GOLDEN") == "write":
        golden.write_all(golden.HERE, tmp_path_factory.mktemp("hosts"))
