from __future__ import annotations

import threading
import time

import pytest

from tracekit.record.outbox import Outbox


def test_writes_are_done_in_order_and_all_before_it_is_left() -> None:
    done: list[int] = []
    with Outbox() as outbox:
        for number in range(100):
            outbox.put(lambda number=number: done.append(number), 10)
    assert done == list(range(100))


def test_flush_waits_for_what_was_put() -> None:
    done: list[int] = []
    with Outbox() as outbox:
        outbox.put(lambda: (time.sleep(0.05), done.append(1)))  # type: ignore[func-returns-value]
        outbox.flush()
        assert done == [1]


def test_a_slow_disk_makes_the_recording_wait_and_memory_stays_bounded() -> None:
    gate, most = threading.Event(), 0
    held = 0
    lock = threading.Lock()

    def write() -> None:
        nonlocal held
        gate.wait(5)
        with lock:
            held -= 40

    def fill() -> None:
        nonlocal held, most
        with Outbox(limit_bytes=100) as outbox:
            for _ in range(20):
                outbox.put(write, 40)
                with lock:
                    held += 40
                    most = max(most, held)

    producer = threading.Thread(target=fill)
    producer.start()
    producer.join(0.2)
    assert producer.is_alive(), "it waits while nothing is written"
    assert most <= 100
    gate.set()
    producer.join(5)
    assert not producer.is_alive()
    assert held == 0


def test_a_piece_above_the_bound_goes_alone() -> None:
    done: list[int] = []
    with Outbox(limit_bytes=10) as outbox:
        outbox.put(lambda: done.append(1), 1000)
        outbox.put(lambda: done.append(2), 1000)
    assert done == [1, 2]


def test_an_error_in_the_thread_stops_the_next_step() -> None:
    def fail() -> None:
        msg = "the disk is gone"
        raise OSError(msg)

    with pytest.raises(OSError, match="the disk is gone"), Outbox() as outbox:  # noqa: PT012
        outbox.put(fail)
        for _ in range(500):
            outbox.check()
            time.sleep(0.01)
        pytest.fail("the error never came")


def test_an_error_in_the_last_write_is_raised_on_leaving() -> None:
    def fail() -> None:
        msg = "no space"
        raise OSError(msg)

    with pytest.raises(OSError, match="no space"), Outbox() as outbox:
        outbox.put(fail)


def test_what_waits_is_written_even_when_it_is_left_by_an_exception() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt), Outbox() as outbox:  # noqa: PT012
        for number in range(10):
            outbox.put(lambda number=number: done.append(number))
        raise KeyboardInterrupt
    assert len(done) == 10
