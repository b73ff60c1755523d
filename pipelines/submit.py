"""Submit the compiled pipeline to a Kubeflow Pipelines server, watch a run, schedule runs."""

from __future__ import annotations

import io
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from pipelines.compile import compile_pipeline
from pipelines.server_answers import CheckedPool, identifier
from ramen.config import Config
from ramen.errors import ConfigError, RamenError, first_line
from ramen.redaction import redact, strip_credentials

TOKEN_ENV = "KF_PIPELINES_TOKEN"
"""Bearer token for servers that want one and do not take the pod's own account."""
ENDPOINT_ENV = "KF_PIPELINES_ENDPOINT"
DONE = {"SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"}
POLL_SECONDS = 10.0
PATIENCE = 12
"""Failed looks in a row after which watching gives up; the run goes on."""


@dataclass(frozen=True)
class Submitted:
    """A run (or a schedule) on the server.

    Attributes:
        id: of the run or schedule.
        url: its page in the Kubeflow UI.
    """

    id: str
    url: str


@dataclass(frozen=True)
class Target:
    """Where and as whom to submit.

    Attributes:
        endpoint: URL of the server; empty = `KF_PIPELINES_ENDPOINT`, the pod's cluster, or kfp's saved context.
        namespace: of the run, on servers with several users; empty = kfp's saved context.
        experiment: made if missing.
        service_account: the steps run as it; empty = the server's default.
    """

    endpoint: str = ""
    namespace: str = ""
    experiment: str = "ramen"
    service_account: str = ""


@contextmanager
def package(file: Path, settings: Config, image: str | None) -> Iterator[Path]:
    """The pipeline to submit: `file`, or compiled now if an image is given.

    Raises:
        RamenError: the file is missing, no pipeline, or takes other parameters than this version's sections.
    """
    if image is not None:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "ramen.yaml"
            compile_pipeline(made, settings, image)
            yield made
        return
    try:
        spec = next(yaml.safe_load_all(file.read_text(encoding="utf-8")))
        taken = set(spec["root"]["inputDefinitions"]["parameters"])
    except FileNotFoundError:
        raise RamenError(f"{file}: no such file; `ramen compile -o {file}` writes it, or give --image") from None
    except (yaml.YAMLError, KeyError, TypeError, StopIteration, UnicodeDecodeError):
        raise RamenError(f"{file}: not a compiled pipeline; `ramen compile -o {file}` writes one") from None
    if other := sorted(taken ^ set(settings.sections())):
        raise RamenError(
            f"{file}: compiled by another version (parameter {other[0]!r} differs); run `ramen compile -o {file}`"
        )
    yield file


def submit(
    pipeline: Path, settings: Config, target: Target, *, name: str, caching: bool | None = None, root: str | None = None
) -> Submitted:
    """Start a run.

    Args:
        pipeline: compiled file.
        settings: become the run's parameters, a section each.
        target: where to.
        name: of the run.
        caching: False = no step is taken from the server's cache; None = as compiled.
        root: where the server keeps artifacts; None = its default.

    Raises:
        RamenError: the server cannot be reached or refuses.
    """
    with _server(target) as (client, experiment):
        run = client.run_pipeline(
            experiment,
            name,
            str(pipeline),
            params=settings.sections(),
            pipeline_root=root,
            enable_caching=caching,
            service_account=target.service_account or None,
        )
        found = identifier(run.run_id, "id of a run")
        return Submitted(found, _page(client, f"runs/details/{found}"))


def schedule(
    pipeline: Path, settings: Config, target: Target, *, name: str, cron: str, root: str | None = None
) -> Submitted:
    """Run again and again, nothing from the server's cache: it would not see that the data are new.

    Args:
        cron: five fields (minute, hour, day, month, weekday), or six with seconds first; the server's time zone.
        root: where the server keeps artifacts; None = its default.

    Raises:
        ConfigError: cron has another number of fields.
        RamenError: the server cannot be reached or refuses.
    """
    fields = cron.split()
    if len(fields) not in (5, 6):
        raise ConfigError(f"--cron {cron!r}: five fields are expected (minute hour day month weekday)")
    with _server(target) as (client, experiment):
        job = client.create_recurring_run(
            experiment,
            name,
            cron_expression=" ".join(fields if len(fields) == 6 else ["0", *fields]),
            max_concurrency=1,
            no_catchup=True,
            params=settings.sections(),
            pipeline_package_path=str(pipeline),
            pipeline_root=root,
            enable_caching=False,
            service_account=target.service_account or None,
        )
        found = identifier(job.recurring_run_id, "id of a schedule")
        return Submitted(found, _page(client, f"recurringrun/details/{found}"))


def watch(run_id: str, target: Target, say: Callable[[str], None], every: float = POLL_SECONDS) -> str:
    """Follow a run to its end, saying each change of a step once.

    Returns:
        Its last state: SUCCEEDED, FAILED, CANCELED or SKIPPED.

    Raises:
        RamenError: the server stays out of reach; the run goes on.
    """
    with _plain(target), redirect_stdout(io.StringIO()):
        client = _client(target)
    known: dict[str, str] = {}
    failures = 0
    while True:
        try:
            run = client.get_run(run_id)
            if not run.state:
                raise RamenError("the answer holds no state of the run")
            failures = 0
        except Exception as error:
            failures += 1
            if failures >= PATIENCE:
                raise RamenError(f"Kubeflow Pipelines: {_first(error)}; the run continues, watch it again") from error
            time.sleep(every)
            continue
        for task in (run.run_details.task_details if run.run_details else None) or []:
            step, state = task.display_name, str(task.state or "")
            if step and state and known.get(step) != state and not step.endswith("-driver") and step != "root":
                known[step] = state
                why = f": {task.error.message}" if task.error and task.error.message else ""
                say(f"{step}: {state.lower()}{why}")
        if str(run.state) in DONE:
            return str(run.state)
        time.sleep(every)


@contextmanager
def _server(target: Target) -> Iterator[tuple[Any, str]]:
    """A client and the id of the experiment to submit to; what kfp prints and warns about on the way is left out."""
    with _plain(target), redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = _client(target)
        made = client.create_experiment(target.experiment, namespace=target.namespace or None)
        yield client, identifier(made.experiment_id, "id of an experiment")


def _client(target: Target) -> Any:
    """kfp's client, with time-outs and checked answers."""
    import kfp

    class Client(kfp.Client):  # type: ignore[misc]
        def get_kfp_healthz(self, sleep_duration: int = 5) -> Any:
            """As kfp's, without its further attempts; its constructor asks for this before anything else."""
            _check_answers(self)
            return self._healthz_api.healthz_service_get_healthz()

    client = Client(
        host=_endpoint(target) or None,
        existing_token=os.environ.get(TOKEN_ENV) or None,
        **({"namespace": target.namespace} if target.namespace else {}),
    )
    _check_answers(client)
    return client


def _check_answers(client: Any) -> None:
    rest = client._healthz_api.api_client.rest_client  # all of the client's APIs share it
    if not isinstance(rest.pool_manager, CheckedPool):
        rest.pool_manager = CheckedPool(rest.pool_manager)


def _endpoint(target: Target) -> str:
    """The server's address as given, "" if none is.

    Raises:
        ConfigError: it is no address of a web server.
    """
    given = target.endpoint or os.environ.get(ENDPOINT_ENV, "")
    try:
        parts = urlsplit(given if "://" in given else f"https://{given}")
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if given and (not valid or not given.isprintable() or " " in given):
        source = "--endpoint" if target.endpoint else ENDPOINT_ENV
        raise ConfigError(f"{source}: {given[:200]!r} is no address; give it as http://HOST:PORT or https://HOST")
    return given


def _page(client: Any, path: str) -> str:
    return redact(strip_credentials(f"{client._get_url_prefix()}/#/{path}"))


@contextmanager
def _plain(target: Target) -> Iterator[None]:
    """One line for whatever the client throws: no server, no rights, a refused pipeline."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        where = target.endpoint or os.environ.get(ENDPOINT_ENV) or "the server of kfp's saved context"
        raise RamenError(
            f"Kubeflow Pipelines at {where}: {_first(error)}; check --endpoint, --namespace and {TOKEN_ENV}"
        ) from error


def _first(error: BaseException) -> str:
    """The server's own message, or the innermost cause."""
    body = getattr(error, "body", None)
    if body:
        try:
            found = json.loads(body)
            return str(found.get("message") or found.get("error") or body).splitlines()[0]
        except (ValueError, AttributeError):
            return str(body).splitlines()[0]
    return first_line(error)
