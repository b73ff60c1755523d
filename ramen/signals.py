"""Handling of SIGTERM and Ctrl-C: the first one requests a clean stop, a second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` at the first SIGTERM or SIGINT; a second SIGINT raises KeyboardInterrupt.

    Further SIGTERMs are ignored: a terminal sends SIGINT to all processes of a command, and the local runner forwards
    its own as SIGTERM. A signal that was ignored (nohup) stays ignored. Outside the main thread no handler is
    installed. Blocks may be nested; the innermost handles the signal.

    Args:
        act: called once; if it raises, the block ends with that exception.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signalled = ctrl_c = False

    def handle(number: int, frame: Any) -> None:
        nonlocal signalled, ctrl_c
        if number == signal.SIGINT and ctrl_c:
            raise KeyboardInterrupt
        is_first, signalled, ctrl_c = not signalled, True, ctrl_c or number == signal.SIGINT
        if is_first:
            act()

    handled = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    previous = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
