from __future__ import annotations

import multiprocessing
import os

import pytest

from syncline.meta import MetaClient, MetaServer
from tests.forkserver import preloaded
from tests.meta import peer
from tests.meta.jobs import QUICK

# A process of its own for every peer, forked from one that has the imports done: it starts in milliseconds.
SPAWN = multiprocessing.get_context("forkserver")


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """An empty directory of run directories, and nothing of the caller's environment."""
    for name in ("SYNCLINE_JOB_TOKEN", "SYNCLINE_META_ENDPOINT", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "run"
    monkeypatch.setenv("SYNCLINE_RUN_DIR", str(path))
    return path


@pytest.fixture
def serve():
    """Start servers in this process; all are stopped at the end."""
    started = []

    def start(job="job", *args, options=QUICK, **kwargs):
        server = MetaServer(job, *args, options=options, **kwargs)
        started.append(server)
        return server.start()

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def client():
    """Make clients; all are closed at the end."""
    made = []

    def make(job="job", options=QUICK, **kwargs):
        made.append(MetaClient(job, options, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="package", autouse=True)
def _fork_server():
    with preloaded("tests.meta.peer"):
        yield


class Peer:
    """A process that runs a function of `tests.meta.peer` in the test's environment."""

    def __init__(self, name, *args):
        self.pipe, theirs = SPAWN.Pipe()
        environment = {key: value for key, value in os.environ.items() if key.startswith("SYNCLINE_")}
        self.process = SPAWN.Process(target=peer.run, args=(theirs, environment, name, args))
        self.process.start()
        theirs.close()
        self.pid = self.process.pid

    def said(self, deadline=20.0):
        assert self.pipe.poll(deadline), "the process said nothing"
        return self.pipe.recv()

    def kill(self):
        self.process.kill()
        self.process.join()

    def stop(self):
        self.pipe.send("stop")
        self.process.join(10)
        return self.process.exitcode


@pytest.fixture
def process():
    """Start processes; they are killed at the end."""
    started = []

    def start(name, *args):
        started.append(Peer(name, *args))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.process.close()
        one.pipe.close()
