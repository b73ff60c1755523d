"""Load a dataset from disk or from memory, and write it as an artifact."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ramen.artifacts import MANIFEST, create_drafts, open_artifact
from ramen.config import DataConfig, parse_section
from ramen.console import warn
from ramen.data import in_memory, sources
from ramen.data.dataset import Dataset
from ramen.data.filters import apply_filter_rule, choose_identity, match_items
from ramen.data.in_memory import is_frame
from ramen.data.statistics import count_items
from ramen.data.subset import hide_labels
from ramen.errors import ConfigError, DataError, Defect

if TYPE_CHECKING:
    import pandas as pd

PathLike = str | os.PathLike[str]
IN_MEMORY_KNOBS = ("filter_self", "seed", "test_fraction", "unseen_labels")
"""Knobs of section `data` that apply to a dataset in memory."""


def load_dataset(
    source: PathLike | pd.DataFrame | Sequence[str],
    labels: Sequence[Iterable[Any]] | None = None,
    *,
    label_texts: Sequence[str] | Mapping[Any, str] | None = None,
    graphs: Mapping[str, Mapping[str, Any]] | None = None,
    ids: Sequence[Any] | None = None,
    split: Sequence[str] | None = None,
    **knobs: Any,
) -> Dataset:
    """Return a dataset, read from disk or built from a DataFrame or lists.

    Args:
        source: a folder in the layout of the Extreme Classification Repository, a Debian snapshot, a dataset artifact
            that ramen wrote; a DataFrame with the columns `text` and `labels` (a list per row), optionally `split` and
            `id`; or the texts of all documents.
        labels: for a list of texts, the labels of each.
        label_texts: None: labels are named by their texts. A list of texts: labels are named by position or text. A
            mapping of ids to texts: labels are named by id.
        graphs: anchor set -> {"documents": edges, "labels": edges}, either or both. Edges are a mapping from a
            document's id (its position or row index if none are given), or a label, to anchor texts; or pairs (id or
            label, anchor text), as a list or a DataFrame of two columns.
        ids: for a list of texts, an identifier of each.
        split: for a list of texts, "train" or "test" for each; None = a random split.
        **knobs: of section `data`. In memory, `test_fraction`, `seed`, `filter_self` and `unseen_labels` apply.

    Returns:
        The dataset with the pairs that do not count (`filter_self`) filtered.

    Raises:
        DataError: the data are broken; the message names the row or the line.
        ConfigError: a knob is unknown, out of range, or has no effect here.
    """
    described = {"labels": labels, "label_texts": label_texts, "graphs": graphs, "ids": ids, "split": split}
    given = [name for name, value in described.items() if value is not None]
    if isinstance(source, str | os.PathLike):
        if given:
            raise ConfigError(f"{given[0]}: has no effect on the data at {os.fspath(source)}; leave it out")
        return _read_dataset(Path(source), knobs)
    if unused := [name for name in knobs if name in DataConfig.model_fields and name not in IN_MEMORY_KNOBS]:
        raise ConfigError(f"data.{unused[0]}: has no effect on data in memory; leave it out")
    settings = _settings(knobs)
    if is_frame(source):
        if named := [name for name in given if name not in ("label_texts", "graphs")]:
            raise ConfigError(f"{named[0]}: a DataFrame has a column of this kind; leave the argument out")
        dataset = in_memory.from_frame(source, settings, label_texts=label_texts, graphs=graphs)
    else:
        if labels is None:
            raise DataError(
                Defect("labels", "expected the labels of each text, found none", "pass them after the texts")
            )
        dataset = in_memory.from_lists(
            cast(Sequence[str], source), labels, settings, ids=ids, split=split, label_texts=label_texts, graphs=graphs
        )
    return _prepared(dataset, settings)


def _read_dataset(path: Path, knobs: Mapping[str, Any]) -> Dataset:
    """Return the dataset of an artifact, or of raw data after the checks of stage `ingest`."""
    if (path / MANIFEST).exists():
        if knobs:
            raise ConfigError(f"data.{next(iter(knobs))}: {path} is a finished dataset; leave the knob out")
        return Dataset.read(open_artifact(path, "dataset").path)
    from ramen.data.validation import validate

    source = "debian" if path.is_file() else "xc"
    settings = _settings({"source": source, "path": os.fspath(path), **knobs})
    dataset = sources.read(settings)
    with tempfile.TemporaryDirectory() as folder:
        report = validate(dataset, Path(folder) / "validation")
    if report.critical:
        raise DataError(*report.critical)
    for warning in report.warnings:
        warn(warning)
    return _prepared(dataset, settings)


def _prepared(dataset: Dataset, settings: DataConfig) -> Dataset:
    """Return the dataset with hidden labels and filtered pairs, as stage `ingest` writes it."""
    if settings.unseen_labels:
        dataset = hide_labels(dataset, settings.unseen_labels, seed=settings.seed)
    return apply_filter_rule(dataset, settings.filter_self)[0]


def write_dataset(dataset: Dataset, place: Path) -> None:
    """Write a dataset artifact, as stage `ingest` does for raw data."""
    identity = ""
    if dataset.own_labels is not None:
        by = choose_identity(dataset)
        identity = by if dataset.own_labels.nnz or match_items(dataset.test, dataset.labels, by).nnz else ""
    with create_drafts({"dataset": place}, sections={}, inputs={}, work=place.parent) as drafted:
        dataset.write(drafted["dataset"].path)
        drafted["dataset"].counts.update(count_items(dataset) | {"filtered_pairs": {"identity": identity}})


def _settings(knobs: Mapping[str, Any]) -> DataConfig:
    """Return section `data`. Raises ConfigError."""
    return cast(DataConfig, parse_section("data", knobs))
