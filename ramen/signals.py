"""Stopping on request: SIGTERM (a pre-empted node) and the first Ctrl-C ask, a second Ctrl-C insists."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` once, at the first SIGTERM or SIGINT; a second SIGINT raises KeyboardInterrupt.

    Further SIGTERMs count for nothing: a terminal sends SIGINT to all processes of a command, and the front passes its
    own on as SIGTERM. A signal that is ignored (nohup) stays ignored. Outside the main thread nothing is installed:
    whoever runs us handles signals. May be nested; the inner one rules until it ends.

    Args:
        act: may raise, then the body ends with that exception.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = interrupted = False

    def handle(number: int, frame: Any) -> None:
        nonlocal asked, interrupted
        if number == signal.SIGINT and interrupted:
            raise KeyboardInterrupt
        first, asked, interrupted = not asked, True, interrupted or number == signal.SIGINT
        if first:
            act()

    heeded = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, handle) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
