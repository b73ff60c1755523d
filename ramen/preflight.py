"""Checks that run before anything trains, so that a stage does not fail after hours.

The stage table lists the checks of each stage; each takes the validated sections. `ramen.stages.preflight` runs them
for all stages before `ramen run` and `ramen ablate` begin, and for a single stage before it opens its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ramen import config
from ramen.artifacts import Artifact, open_artifact
from ramen.data import sources
from ramen.encoder.checks import PACKAGED, check_folder, encoder_error, encoder_width
from ramen.errors import ArtifactError, ConfigError, RamenError, first_line, suggest_name
from ramen.evaluation.metrics import REPORTED
from ramen.evaluation.per_document import read_propensity
from ramen.evaluation.quantiles import LABEL_DEPTHS
from ramen.index.build import make_index
from ramen.publishing.registry import connect, translate_store_errors
from ramen.retrieval import load_faiss
from ramen.tracking import REGISTRATION_NEEDS_TRACKING, tracking_is_off
from ramen.tracking.store import Store

Sections = Mapping[str, Any]
"""Section name -> validated section, at least those of the stage."""
REPLY_S = 10
"""Timeout of a request to Hugging Face, in seconds."""


def check_faiss(sections: Sections) -> None:
    """Raise MissingExtra if faiss is not installed."""
    load_faiss()


def check_encoder(sections: Sections) -> None:
    """Check that the encoder exists and can be used. Raises RamenError if not."""
    name = sections["encoder"].name
    folder = Path(name)
    if folder.is_dir():
        check_folder(folder)
    elif folder.exists() or name.count("/") > 1 or name.startswith(("/", "./", "../", "~")):
        raise encoder_error(name, "is not a directory", "give a directory, a Hugging Face name, minilm or tiny")
    elif name not in PACKAGED:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        try:
            if not isinstance(try_to_load_from_cache(name, "config.json"), str):
                hf_hub_download(name, "config.json", etag_timeout=REPLY_S)
        except Exception as error:  # of the library, its HTTP client, or the system
            raise encoder_error(
                name, f"is neither a directory nor a Hugging Face model that can be loaded ({first_line(error)})",
                "set encoder.name to the directory of a downloaded model, or to minilm",
            ) from None  # fmt: skip


def check_anchor_sets(sections: Sections) -> None:
    """Raise ConfigError if a knob names an anchor set that the raw data do not have.

    Does nothing without the section `data`.
    """
    objective: config.ObjectiveConfig = sections["objective"]
    guidance: config.GuidanceConfig = sections["guidance"]
    known = sources.anchor_set_names(sections["data"]) if "data" in sections else None
    if known is None:
        return
    if objective.graphs or objective.augment_labels:
        objective.check_anchor_sets(known)
    if guidance.enabled:
        config.check_known(guidance.anchor_sets, known, "guidance.anchor_sets")


def check_base(sections: Sections) -> Artifact | None:
    """Open the evaluation `scoring.base`; None if it is not set.

    Raises:
        ArtifactError: it is not an evaluation, or has other propensity parameters.
    """
    scoring: config.ScoringConfig = sections["scoring"]
    if not scoring.base:
        return None
    try:
        base = open_artifact(scoring.base, "evaluation")
    except ArtifactError as error:
        raise ArtifactError(f"scoring.base = {scoring.base}: {error}") from None
    a, b = read_propensity(base.path)
    if (a, b) != (scoring.propensity_a, scoring.propensity_b):
        raise ArtifactError(
            f"scoring.base = {scoring.base}: propensity parameters a={a}, b={b}, expected "
            f"a={scoring.propensity_a}, b={scoring.propensity_b}; evaluate both with the same ones"
        )
    return base


def check_index(sections: Sections) -> None:
    """Raise ConfigError if `index.kind` is a factory string that does not fit the encoder's dimension."""
    settings, width = sections["index"], encoder_width(sections["encoder"].name)
    if settings.kind not in config.INDEX_KINDS and width:
        make_index(settings.kind, width)


def check_gate(sections: Sections) -> None:
    """Raise ConfigError if `index.gate` names an unknown metric."""
    known = [f"{metric}_at_{k}" for metric, depths in REPORTED.items() for k in depths]
    known += [f"label_r_at_{k}" for k in LABEL_DEPTHS]
    for metric in sections["index"].gate if sections["index"].model else ():
        if not metric.startswith("links/") and metric.rpartition("/")[2] not in known:
            hint = suggest_name(metric.rpartition("/")[2], known)
            raise ConfigError(f"index.gate: {metric}: not measured by `ramen evaluate`; {hint}")


def check_registry(sections: Sections) -> None:
    """Check that the retriever can be registered, if `index.model` is set.

    Raises:
        RamenError: tracking is off, or the registry cannot be reached.
    """
    settings: config.IndexConfig = sections["index"]
    if not settings.model:
        return
    if tracking_is_off():
        raise RamenError(REGISTRATION_NEEDS_TRACKING)
    Store.connect()
    with translate_store_errors("looking for the model registry"):
        connect().search_registered_models(max_results=1)
