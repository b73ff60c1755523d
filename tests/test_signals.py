"""`on_interrupt`: the first signal calls the action, a second Ctrl-C raises KeyboardInterrupt."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from ramen.signals import on_interrupt


@pytest.fixture(autouse=True)
def default_sigint() -> Iterator[None]:
    """Restore the default handler: background jobs of a shell, and tests in them, ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_calls_the_action_and_handlers_are_restored(number: int) -> None:
    calls: list[int] = []
    before = signal.getsignal(number)
    with on_interrupt(lambda: calls.append(1)):
        send(number)
    assert calls == [1] and signal.getsignal(number) is before


def test_action_is_called_once_for_signals_of_terminal_and_runner() -> None:
    calls: list[int] = []
    with on_interrupt(lambda: calls.append(1)):
        send(signal.SIGINT, signal.SIGTERM, signal.SIGTERM)
    assert calls == [1]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_second_ctrl_c_raises_keyboard_interrupt(first: int) -> None:
    calls: list[int] = []
    with pytest.raises(KeyboardInterrupt), on_interrupt(lambda: calls.append(1)):
        send(first, signal.SIGINT)
        send(signal.SIGINT)
        raise AssertionError("still running")
    assert calls == [1]


def test_innermost_block_handles_the_signal() -> None:
    calls: list[str] = []
    with on_interrupt(lambda: calls.append("outer")):
        with on_interrupt(lambda: calls.append("inner")):
            send(signal.SIGTERM)
        send(signal.SIGTERM)
    assert calls == ["inner", "outer"]


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with on_interrupt(lambda: pytest.fail("called for an ignored signal")):
            send(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_no_handler_is_installed_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def body() -> None:
        with on_interrupt(lambda: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[object] = []
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]
