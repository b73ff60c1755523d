"""Signals ask once; a second Ctrl-C insists."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from ramen.signals import on_interrupt


@pytest.fixture(autouse=True)
def listening() -> Iterator[None]:
    """A shell's background job ignores Ctrl-C, and so would the tests in it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_old_handlers_come_back(number: int) -> None:
    asked: list[int] = []
    before = signal.getsignal(number)
    with on_interrupt(lambda: asked.append(1)):
        send(number)
    assert asked == [1] and signal.getsignal(number) is before


def test_what_a_terminal_and_a_front_send_counts_as_one() -> None:
    asked: list[int] = []
    with on_interrupt(lambda: asked.append(1)):
        send(signal.SIGINT, signal.SIGTERM, signal.SIGTERM)
    assert asked == [1]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_insists(first: int) -> None:
    asked: list[int] = []
    with pytest.raises(KeyboardInterrupt), on_interrupt(lambda: asked.append(1)):
        send(first, signal.SIGINT)
        send(signal.SIGINT)
        raise AssertionError("still running")
    assert asked == [1]


def test_the_inner_one_rules_until_it_ends() -> None:
    asked: list[str] = []
    with on_interrupt(lambda: asked.append("outer")):
        with on_interrupt(lambda: asked.append("inner")):
            send(signal.SIGTERM)
        send(signal.SIGTERM)
    assert asked == ["inner", "outer"]


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with on_interrupt(lambda: pytest.fail("nohup asked for silence")):
            send(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_installs_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def body() -> None:
        with on_interrupt(lambda: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[object] = []
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]
