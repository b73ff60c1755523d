"""Submit the compiled pipeline to a Kubeflow Pipelines server, watch a run, and schedule runs."""

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
from pipelines.server_answers import CheckedPool, check_id
from ramen.config import Config
from ramen.errors import ConfigError, RamenError, first_line
from ramen.redaction import redact, strip_credentials

TOKEN_ENV = "KF_PIPELINES_TOKEN"
"""Bearer token, for servers that require one and do not accept the pod's service account."""
ENDPOINT_ENV = "KF_PIPELINES_ENDPOINT"
FINAL_STATES = {"SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"}
POLL_SECONDS = 10.0
MAX_FAILED_REQUESTS = 12
"""Consecutive failed requests after which `watch` gives up; the run itself continues."""


@dataclass(frozen=True)
class Submitted:
    """A run (or a schedule) on the server.

    Attributes:
        id: id of the run or schedule.
        url: its page in the Kubeflow UI.
    """

    id: str
    url: str


@dataclass(frozen=True)
class Target:
    """The server to submit to, and the account to use.

    Attributes:
        endpoint: URL of the server; empty = `KF_PIPELINES_ENDPOINT`, the pod's cluster, or kfp's saved context.
        namespace: namespace of the run, on multi-user servers; empty = kfp's saved context.
        experiment: experiment of the run; created if missing.
        service_account: account of the steps; empty = the server's default.
    """

    endpoint: str = ""
    namespace: str = ""
    experiment: str = "ramen"
    service_account: str = ""


@contextmanager
def package(file: Path, config: Config, image: str | None) -> Iterator[Path]:
    """Yield the pipeline file to submit: `file`, or, with an image, one that is compiled now.

    Raises:
        RamenError: the file is missing, is not a pipeline, or its parameters are not this version's sections.
    """
    if image is not None:
        with tempfile.TemporaryDirectory() as folder:
            compiled = Path(folder) / "ramen.yaml"
            compile_pipeline(compiled, config, image)
            yield compiled
        return
    try:
        spec = next(yaml.safe_load_all(file.read_text(encoding="utf-8")))
        parameters = set(spec["root"]["inputDefinitions"]["parameters"])
    except FileNotFoundError:
        raise RamenError(f"{file}: no such file; `ramen compile -o {file}` writes it, or give --image") from None
    except (yaml.YAMLError, KeyError, TypeError, StopIteration, UnicodeDecodeError):
        raise RamenError(f"{file}: not a compiled pipeline; `ramen compile -o {file}` writes one") from None
    if differing := sorted(parameters ^ set(config.sections())):
        raise RamenError(
            f"{file}: compiled by another version (parameter {differing[0]!r} differs); run `ramen compile -o {file}`"
        )
    yield file


def submit(
    pipeline: Path, config: Config, target: Target, *, name: str, caching: bool | None = None, root: str | None = None
) -> Submitted:
    """Start a run.

    Args:
        pipeline: compiled pipeline file.
        config: its sections become the run's parameters.
        target: server and account.
        name: name of the run.
        caching: False = do not use the server's cache; None = as compiled.
        root: URL under which the server stores artifacts; None = its default.

    Raises:
        RamenError: the server cannot be reached or refuses.
    """
    with _server(target) as (client, experiment):
        run = client.run_pipeline(
            experiment,
            name,
            str(pipeline),
            params=config.sections(),
            pipeline_root=root,
            enable_caching=caching,
            service_account=target.service_account or None,
        )
        run_id = check_id(run.run_id, "run id")
        return Submitted(run_id, _page_url(client, f"runs/details/{run_id}"))


def schedule(
    pipeline: Path, config: Config, target: Target, *, name: str, cron: str, root: str | None = None
) -> Submitted:
    """Create a recurring run that never uses the server's cache, because the cache does not notice changed data.

    Args:
        pipeline, config, target, name, root: as in `submit`.
        cron: five fields (minute, hour, day, month, weekday), or six with seconds first; in the server's time zone.

    Raises:
        ConfigError: `cron` has another number of fields.
        RamenError: the server cannot be reached or refuses.
    """
    fields = cron.split()
    if len(fields) not in (5, 6):
        raise ConfigError(f"--cron {cron!r}: expected five fields (minute hour day month weekday), found {len(fields)}")
    with _server(target) as (client, experiment):
        job = client.create_recurring_run(
            experiment,
            name,
            cron_expression=" ".join(fields if len(fields) == 6 else ["0", *fields]),
            max_concurrency=1,
            no_catchup=True,
            params=config.sections(),
            pipeline_package_path=str(pipeline),
            pipeline_root=root,
            enable_caching=False,
            service_account=target.service_account or None,
        )
        job_id = check_id(job.recurring_run_id, "schedule id")
        return Submitted(job_id, _page_url(client, f"recurringrun/details/{job_id}"))


def watch(run_id: str, target: Target, report: Callable[[str], None], interval: float = POLL_SECONDS) -> str:
    """Wait for a run to end, and report each change of a step's state once.

    Returns:
        The final state: SUCCEEDED, FAILED, CANCELED or SKIPPED.

    Raises:
        RamenError: the server is unreachable; the run continues.
    """
    with _report_as_one_line(target), redirect_stdout(io.StringIO()):
        client = _client(target)
    states: dict[str, str] = {}
    failures = 0
    while True:
        try:
            run = client.get_run(run_id)
            if not run.state:
                raise RamenError("the response has no run state")
            failures = 0
        except Exception as error:
            failures += 1
            if failures >= MAX_FAILED_REQUESTS:
                raise RamenError(
                    f"Kubeflow Pipelines: {_first_line(error)}; the run continues, watch it again"
                ) from error
            time.sleep(interval)
            continue
        for task in (run.run_details.task_details if run.run_details else None) or []:
            step, state = task.display_name, str(task.state or "")
            if step and state and states.get(step) != state and not step.endswith("-driver") and step != "root":
                states[step] = state
                cause = f": {task.error.message}" if task.error and task.error.message else ""
                report(f"{step}: {state.lower()}{cause}")
        if str(run.state) in FINAL_STATES:
            return str(run.state)
        time.sleep(interval)


@contextmanager
def _server(target: Target) -> Iterator[tuple[Any, str]]:
    """Yield a client and the id of the experiment, creating it if needed; hides kfp's output and warnings."""
    with _report_as_one_line(target), redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = _client(target)
        experiment = client.create_experiment(target.experiment, namespace=target.namespace or None)
        yield client, check_id(experiment.experiment_id, "experiment id")


def _client(target: Target) -> Any:
    """Return kfp's client with time limits and checked responses."""
    import kfp

    class Client(kfp.Client):  # type: ignore[misc]
        def get_kfp_healthz(self, sleep_duration: int = 5) -> Any:
            """Request the server's health once, without kfp's retries; kfp's constructor calls this first."""
            _use_checked_pool(self)
            return self._healthz_api.healthz_service_get_healthz()

    client = Client(
        host=_endpoint(target) or None,
        existing_token=os.environ.get(TOKEN_ENV) or None,
        **({"namespace": target.namespace} if target.namespace else {}),
    )
    _use_checked_pool(client)
    return client


def _use_checked_pool(client: Any) -> None:
    rest = client._healthz_api.api_client.rest_client  # shared by all APIs of the client
    if not isinstance(rest.pool_manager, CheckedPool):
        rest.pool_manager = CheckedPool(rest.pool_manager)


def _endpoint(target: Target) -> str:
    """Return the server's address as the user gave it, or "".

    Raises:
        ConfigError: it is not the address of a web server.
    """
    endpoint = target.endpoint or os.environ.get(ENDPOINT_ENV, "")
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if endpoint and (not valid or not endpoint.isprintable() or " " in endpoint):
        source = "--endpoint" if target.endpoint else ENDPOINT_ENV
        raise ConfigError(
            f"{source}: {endpoint[:200]!r} is not an address; give it as http://HOST:PORT or https://HOST"
        )
    return endpoint


def _page_url(client: Any, path: str) -> str:
    return redact(strip_credentials(f"{client._get_url_prefix()}/#/{path}"))


@contextmanager
def _report_as_one_line(target: Target) -> Iterator[None]:
    """Turn any error of the client into a RamenError of one line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        where = target.endpoint or os.environ.get(ENDPOINT_ENV) or "the server of kfp's saved context"
        raise RamenError(
            f"Kubeflow Pipelines at {where}: {_first_line(error)}; check --endpoint, --namespace and {TOKEN_ENV}"
        ) from error


def _first_line(error: BaseException) -> str:
    """Return the first line of the server's message, or of the innermost cause."""
    body = getattr(error, "body", None)
    if body:
        try:
            content = json.loads(body)
            return str(content.get("message") or content.get("error") or body).splitlines()[0]
        except (ValueError, AttributeError):
            return str(body).splitlines()[0]
    return first_line(error)
