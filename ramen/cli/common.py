"""Shared by all commands: help by topic, error lines, configuration options, and progress on stderr."""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ramen.errors import (
    CONTROL_CHARACTERS,
    ConfigError,
    Interrupted,
    RamenError,
    error_lines,
    find_lone_surrogate,
    printable,
    short_repr,
)
from ramen.files import describe_io_error
from ramen.redaction import RedactingFilter
from ramen.tracking import is_store_error, store_error

if TYPE_CHECKING:
    from ramen.config import Config

Function = TypeVar("Function", bound=Callable[..., Any])


class _Path(click.Path):
    """A path without control characters."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if CONTROL_CHARACTERS.search(str(value)):
            option = f"{param.opts[0]} " if param else ""
            raise ConfigError(f"{option}{short_repr(str(value))}: the path has control characters; choose another path")
        return super().convert(value, param, ctx)


PATH = _Path(path_type=Path)
FILE = _Path(path_type=Path, dir_okay=False)


def image_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Click callback that checks a container image: a name with or without registry, tag and digest."""
    if value is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}", value):
        raise click.BadParameter(f"expected an image such as registry.example/ramen@sha256:..., found {value!r}")
    return value


class CommandError(click.ClickException):
    """A RamenError or Interrupted as click reports it: its lines on stderr, and its exit code."""

    def __init__(self, error: RamenError | Interrupted) -> None:
        super().__init__(str(error))
        self.exit_code = error.exit_code  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        for line in error_lines(self.message):
            click.echo(line, err=True)


class CommandGroup(click.Group):
    """A click group whose help lists commands by topic, and which reports a RamenError as lines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.titles: dict[str, list[str]] = {}

    def add(self, title: str, *commands: click.Command) -> None:
        """Add commands under a title in the help page."""
        for command in commands:
            self.add_command(command)
            self.titles.setdefault(title, []).append(str(command.name))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in self.titles.values() for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, names in self.titles.items():
            with formatter.section(title):
                rows = [(name.ljust(width), self.commands[name].get_short_help_str(90)) for name in names]
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self.commands, n=1)
            hint = f"did you mean {close[0]}?" if close else "`ramen --help` lists them"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _printable_usage():
            for argument in args:
                if find_lone_surrogate(argument):
                    raise click.UsageError(f"the argument '{argument}' is not UTF-8; rename the file or folder", ctx)
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _printable_usage():
                _check_working_directory()
                return super().invoke(ctx)
        except (RamenError, Interrupted) as error:
            raise CommandError(error) from error
        except MemoryError as error:
            details = f" ({error})" if str(error) else ""
            raise CommandError(RamenError(f"not enough memory{details}; use a larger machine or less data")) from error
        except Exception as error:
            if (
                isinstance(error, OSError)
                and not isinstance(error, BrokenPipeError)
                and (reason := describe_io_error(error))
            ):
                raise CommandError(RamenError(reason)) from error
            if is_store_error(error):
                raise CommandError(store_error(error)) from error
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)


@contextlib.contextmanager
def _printable_usage() -> Iterator[None]:
    """Escape unprintable characters of the command line that click quotes in its messages."""
    try:
        yield
    except click.UsageError as error:
        lines = error.format_message().split("\n")
        if lines == [printable(line) for line in lines]:
            raise
        raise click.UsageError("\n".join(map(printable, lines)), error.ctx) from None


def _check_working_directory() -> None:
    """Raise RamenError if the working directory was deleted, or its path is not UTF-8."""
    try:
        path = str(Path.cwd())
    except FileNotFoundError:
        raise RamenError("the working directory was deleted; change to another folder") from None
    if find_lone_surrogate(path):
        raise RamenError(f"{path}: the path of the working directory is not UTF-8; rename the folder")


def config_options(function: Function) -> Function:
    """Add the options `--preset`, `--params` and `--set`; the command receives a function `resolve`."""

    @click.option("--preset", metavar="NAME", help="Start from a preset (ramen/presets) instead of params.yaml.")
    @click.option("--params", type=FILE, metavar="FILE", help="Parameter file.  [default: params.yaml if it exists]")
    @click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Set one knob; may be repeated.")
    @functools.wraps(function)
    def wrapped(*, preset: str | None, params: Path | None, sets: tuple[str, ...], **kwargs: Any) -> Any:
        def resolve(*more: str) -> Config:
            """Return the configuration; `more` are assignments from options of the command, applied last."""
            from ramen.base import check_name
            from ramen.config import resolve

            config = resolve(preset=preset, params=params, sets=[*sets, *more])
            check_name(config.base.name)  # now, rather than when the third stage starts
            return config

        return function(resolve=resolve, **kwargs)

    return wrapped  # type: ignore[return-value]


def require_config() -> None:
    """Check that the user chose a configuration: the defaults train on all of Debian, for an hour.

    Raises:
        ConfigError: no parameter file, and none of `--preset`, `--params` and `--set`.
    """
    from ramen.config import PARAMS_FILE

    given = click.get_current_context().params
    if not (given["preset"] or given["params"] or given["sets"] or Path(PARAMS_FILE).is_file()):
        raise ConfigError(
            f"no configuration: no {PARAMS_FILE} in this directory; give --preset demo (some minutes), --preset debian "
            "(an hour), or --preset xc --set data.path=DIR for your own data"
        )


def show_progress() -> None:
    """Send the package's log records to stderr, one line each."""
    logger = logging.getLogger("ramen")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.addFilter(RedactingFilter())
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
