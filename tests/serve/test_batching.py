"""Concurrent requests are processed in batches."""

import asyncio
import threading

import pytest
from fake_index import FakeIndex, encoded, picture
from waiting import result_of

from nearfar.serve.batching import Batcher, ServerBusy


def test_those_who_wait_are_taken_together():
    begun, go, sizes = threading.Event(), threading.Event(), []

    def work(items):
        begun.set()
        go.wait(5)
        return [item * item for item in items]

    batcher = Batcher(work, max_size=8, on_batch=sizes.append)
    batcher.start()
    futures = [batcher.submit(0)]
    assert begun.wait(5)
    futures += [batcher.submit(number) for number in range(1, 12)]
    assert len(batcher) == 11
    go.set()
    assert [future.result(5) for future in futures] == [number**2 for number in range(12)]
    batcher.stop()
    assert sizes == [1, 8, 3]


def test_only_the_guilty_one_fails():
    def work(items):
        return [1 / item for item in items]

    batcher = Batcher(work)
    with batcher._changed:  # nothing is taken before all are there
        batcher._open = True
        futures = [batcher.submit(number) for number in (1, 0, 2)]
    batcher.start()
    batcher.stop()
    assert (futures[0].result(), futures[2].result()) == (1, 0.5)
    with pytest.raises(ZeroDivisionError):
        futures[1].result()


def test_what_must_not_be_done_twice_fails_together():
    calls = []

    def work(items):
        calls.append(len(items))
        raise OSError("disk full")

    batcher = Batcher(work, retry=False)
    with batcher._changed:
        batcher._open = True
        futures = [batcher.submit(number) for number in range(3)]
    batcher.start()
    batcher.stop()
    assert calls == [3]
    for future in futures:
        with pytest.raises(OSError, match="disk full"):
            future.result()


def test_the_line_has_an_end():
    go = threading.Event()
    batcher = Batcher(lambda items: (go.wait(5), items)[1], max_waiting=2)
    batcher.start()
    first = batcher.submit(0)
    while len(batcher):
        pass
    others = [batcher.submit(number) for number in (1, 2)]
    with pytest.raises(ServerBusy, match="2 requests are waiting already"):
        batcher.submit(3)
    go.set()
    assert [future.result(5) for future in (first, *others)] == [0, 1, 2]
    batcher.stop()


def test_stopping_finishes_what_was_taken_and_takes_nothing_more():
    batcher = Batcher(lambda items: items)
    batcher.start()
    futures = [batcher.submit(number) for number in range(50)]
    batcher.stop()
    assert [future.result(0) for future in futures] == list(range(50))
    with pytest.raises(ServerBusy, match="stopping"):
        batcher.submit(1)


def test_whoever_went_away_is_not_worked_for():
    begun, go, done = threading.Event(), threading.Event(), []

    def work(items):
        begun.set()
        go.wait(5)
        done.extend(items)
        return items

    async def visit():
        batcher.start()
        first = asyncio.ensure_future(batcher(0))
        await asyncio.to_thread(begun.wait, 5)
        leaving = asyncio.ensure_future(batcher(1))
        await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        go.set()
        assert await first == 0
        await asyncio.to_thread(batcher.stop)

    batcher = Batcher(work)
    result_of(visit())
    assert done == [0]


def test_a_busy_server_says_when_to_come_back(client):
    served = client(FakeIndex(4))
    served.app.state.server.embed.stop()
    answer = served.post("/api/v1/search", files={"image": encoded(picture(3))})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy")
    assert answer.headers["retry-after"] == "1"
