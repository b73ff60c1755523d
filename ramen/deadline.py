"""A time limit for calls that have none, or whose own limit a slow server can extend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def call_with_timeout(seconds: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in a daemon thread and return its result.

    The timeout of a socket restarts with every byte, so a server that sends one byte per second can hold a request for
    hours. After the limit the thread is abandoned; it does not keep the process alive.

    Raises:
        TimeoutError: no result within the limit.
        Exception: any exception of the function.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # raised by the function itself
            raise
        raise TimeoutError(f"no complete answer after {seconds:g} s") from None
