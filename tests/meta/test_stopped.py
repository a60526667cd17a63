"""A process that stood still for longer than a request may take goes on with what has arrived meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from syncline.errors import SynclineError
from syncline.meta import MetaClient, client
from syncline.protocol import messages as m

QUERY = m.StatusQuery(table="")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> tuple[MetaClient, Future[m.Message]]:
    """Return a client whose waits have run out, and the future that its I/O thread has not set yet."""
    monkeypatch.setattr(client, "_SLACK", -1.0)
    answer: Future[m.Message] = Future()
    made = MetaClient.__new__(MetaClient)
    made.job = "job"
    monkeypatch.setattr(made, "submit", lambda _message, _seconds: answer, raising=False)
    return made, answer


def test_an_answer_that_arrived_during_the_stop_counts(
    slow: tuple[MetaClient, Future[m.Message]],
) -> None:
    made, answer = slow
    timer = threading.Timer(0.2, answer.set_result, [QUERY])
    timer.start()
    assert made.request(QUERY, 1.0) is QUERY
    timer.join()


def test_an_io_thread_that_says_nothing_even_then_is_stuck(
    slow: tuple[MetaClient, Future[m.Message]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_TURN", 0.1)
    with pytest.raises(SynclineError, match="is stuck"):
        slow[0].request(QUERY, 1.0)
