"""Sandboxes shared by the tests of one module: opening one costs more than a test."""

import os
import time
from pathlib import Path

import pytest

from agent_envs.errors import SandboxUnavailableError
from agent_envs.sandbox import open_sandbox


@pytest.fixture(scope="module")
def sandbox():
    try:
        opened = open_sandbox("strong")
    except SandboxUnavailableError as error:
        pytest.skip(f"no strong isolation here: {error}")
    with opened:
        yield opened


@pytest.fixture(scope="module")
def plain_sandbox():
    with open_sandbox("limits") as opened:
        yield opened


def processes_below(ancestor):
    """Return the ids of all descendants of a process."""
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(path.name)] = int(fields[1])
    below = {ancestor}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {ancestor}


@pytest.fixture
def leaves_nothing():
    """Return a check: no process, file or descriptor more than when the test began."""

    def count():
        files = [
            path
            for folder in ("/tmp", "/dev/shm")
            for path in Path(folder).glob("agent-envs-*")
            if not path.name.startswith("agent-envs-folders-")  # another worker's, to its end
        ]
        descriptors = [("descriptor", p.name) for p in Path("/proc/self/fd").iterdir()]
        return {*processes_below(os.getpid()), *files, *descriptors}

    before = count()

    def check():
        deadline = time.monotonic() + 100
        while count() - before and time.monotonic() < deadline:
            time.sleep(0.05)  # the last supervisor may still be on its way out
        assert count() - before == set()

    return check
