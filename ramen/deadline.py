"""A time limit for calls that have none, or one that a slow peer can extend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def call_within(seconds: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in another thread and return its result.

    The time-out of a socket starts again with every byte, so a server that sends a byte per second holds a request for
    hours. A thread whose time is over is abandoned and does not keep the process alive.

    Raises:
        TimeoutError: no result in time; any exception of the function is raised as well.
    """
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():
            raise
        raise TimeoutError(f"the answer is not complete after {seconds:g} s") from None
