"""Validation of a dataset with Great Expectations, and its report (Data Docs).

The rules check three small tables: `texts` (one row per text: part, uid, length), `relations` (one row per matrix, with
its defects counted in numpy) and `problem` (one row). The tables hold no texts, so the Data Docs show none. A failed
rule of severity `critical` stops the stage; a `warning` is only reported.

The Data Docs are part of the dataset, whose digest must depend on its content alone: the run time is set to the epoch,
and the remaining time stamps and random identifiers in the HTML are replaced.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import io
import logging
import os
import re
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.sparse as sp

from ramen.data.dataset import PLACEHOLDER, Dataset
from ramen.data.identity import shared_uids
from ramen.data.statistics import iter_matrices, iter_texts
from ramen.errors import Defect

_TIMESTAMP = re.compile(r"\d{8}T\d{6}\.\d{6}Z")
_LOCAL_EPOCH = re.compile(r"(?:1970-01-01|1969-12-31)([ T])\d\d:\d\d:\d\d(?:Z| [A-Z\d+-]+)")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_TUTORIAL_IMAGES = "static/images/*.gif"
"""Animations of the Data Docs, 3 MB that the pages do not need."""


@dataclass(frozen=True)
class Rule:
    """An expectation: the values of a column lie between two bounds, or are unique within their part.

    Attributes:
        table, column: the checked values.
        message: describes a violation; `{value}` and the names of the row's columns are filled in.
        fix: what the user can do.
        low, high: bounds, None = open; both None = unique.
        severity: `critical` stops the stage.
        part: location of the defect if the table's rows do not name it; as in `Dataset.files`.
    """

    table: str
    column: str
    message: str
    fix: str = ""
    low: float | None = None
    high: float | None = None
    severity: Literal["critical", "warning"] = "critical"
    part: str = ""


_ADD_PAIRS = "add some, or check the file of filtered pairs if there is one"

RULES = (
    Rule("texts", "uid_characters", "expected an identifier, found none", low=1),
    Rule("texts", "uid", "duplicate identifier {value!r}", "make the identifiers of each file unique"),
    Rule("texts", "characters", "expected a text, found none", "write a placeholder", low=1),
    Rule("texts", "placeholder", f"empty text, replaced by {PLACEHOLDER}", high=0, severity="warning"),
    Rule("relations", "row_surplus", "expected {expected_rows} rows, one per text, found {rows}",
         "row i must be text i", 0, 0),
    Rule("relations", "column_surplus", "expected {expected_columns} columns, one per text, found {columns}",
         "column j must be text j", 0, 0),
    Rule("relations", "out_of_range", "{value} entries outside the {columns} columns", "check the indices", high=0),
    Rule("relations", "repeated", "{value} repeated entries", "list each column once per row", high=0),
    Rule("relations", "unequal_one", "{value} values are not 1", "matrices are binary", high=0),
    Rule("relations", "unlabelled", "{value} documents have no label", high=0, severity="warning"),
    Rule("problem", "documents", "expected training documents, found none", low=1, part="texts/train"),
    Rule("problem", "test_documents", "expected test documents, found none", low=1, part="texts/test"),
    Rule("problem", "labels", "expected at least two labels, found {value}", low=2, part="texts/labels"),
    Rule("problem", "pairs", "no training document has an unfiltered label", _ADD_PAIRS, low=1, part="labels/train"),
    Rule("problem", "test_pairs", "no test document has an unfiltered label", _ADD_PAIRS, low=1, part="labels/test"),
    Rule("problem", "overlap", "{value} test documents are also training documents (first: {first_overlap!r})",
         "remove them from one of the two", high=0, part="texts/test"),
    Rule("problem", "twins", "{value} training documents repeat the text of another one",
         "write one line per text with all its labels: copies are negatives of each other's labels",
         high=0, severity="warning", part="texts/train"),
    Rule("problem", "same_text", "{value} test documents have the text of a training document ({same_content} also "
         "its labels)", "remove the copies from one of the two: they measure memorisation", high=0,
         severity="warning", part="texts/test"),
)  # fmt: skip


@dataclass(frozen=True)
class ValidationReport:
    """Defects found by the validation: critical ones, and warnings."""

    critical: list[Defect]
    warnings: list[Defect]


def validate(dataset: Dataset, folder: Path) -> ValidationReport:
    """Check all rules, write the Data Docs (`index.html`) under `folder`, and return the defects.

    Critical defects are not raised: the caller stores the report first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "texts": _texts_table(dataset),
        "relations": _matrices_table(dataset),
        "problem": _dataset_table(dataset),
    }
    report = ValidationReport([], [])
    for rule, rows, count in _failures(tables, folder):
        target = report.critical if rule.severity == "critical" else report.warnings
        target.extend(_defects(rule, tables[rule.table], rows, dataset.files))
        if count > len(rows):
            target.append(Defect(target[-1].file, f"and {count - len(rows):,} more defects of this kind"))
    _make_reproducible(folder)
    return report


# --- the tables ----------------------------------------------------------------------------------------------


def _texts_table(dataset: Dataset) -> pd.DataFrame:
    parts = []
    for name, texts in iter_texts(dataset):
        stripped = [text.strip() for text in texts.texts]
        parts.append(
            pd.DataFrame(
                {
                    "part": name,
                    "row": np.arange(1, len(texts) + 1),
                    "uid": texts.uids,
                    "uid_characters": np.fromiter(map(len, texts.uids), np.int64, len(texts)),
                    "characters": np.fromiter(map(len, stripped), np.int64, len(texts)),
                    "placeholder": np.fromiter((text == PLACEHOLDER for text in stripped), np.int64, len(texts)),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def _matrices_table(dataset: Dataset) -> pd.DataFrame:
    rows = []
    for name, matrix, expected in iter_matrices(dataset):
        row_of = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        masks = {
            "out_of_range": (matrix.indices < 0) | (matrix.indices >= matrix.shape[1]),
            "repeated": _repeated(matrix, row_of),
            "unequal_one": matrix.data != 1,
        }
        empty = np.diff(matrix.indptr) == 0 if name in ("labels/train", "labels/test") else np.zeros(0, bool)
        rows.append(
            {
                "part": name,
                "rows": matrix.shape[0],
                "columns": matrix.shape[1],
                "expected_rows": expected[0],
                "expected_columns": expected[1],
                "row_surplus": matrix.shape[0] - expected[0],
                "column_surplus": matrix.shape[1] - expected[1],
                **{key: int(mask.sum()) for key, mask in masks.items()},
                **{f"{key}_row": _first_row(row_of[mask]) for key, mask in masks.items()},
                "unlabelled": int(empty.sum()),
                "unlabelled_row": _first_row(np.flatnonzero(empty)),
            }
        )
    return pd.DataFrame(rows)


def _repeated(matrix: sp.csr_matrix, row_of: Any) -> Any:
    """Return which entries repeat a column of their row, bool [nnz]."""
    order = np.lexsort((matrix.indices, row_of))
    repeats = (np.diff(matrix.indices[order]) == 0) & (np.diff(row_of[order]) == 0)
    mask = np.zeros(len(order), bool)
    mask[order[1:][repeats]] = True
    return mask


def _first_row(rows: Any) -> int:
    """Return the smallest row number, one-based; 0 if there are no rows."""
    return int(rows.min()) + 1 if len(rows) else 0


def _dataset_table(dataset: Dataset) -> pd.DataFrame:
    shared = shared_uids(dataset.test, dataset.train)
    overlap = [uid for uid in dataset.test.uids if uid in shared]
    train_texts = [text for text in dataset.train.texts if text != PLACEHOLDER]
    unique_texts = set(train_texts)
    train_digests = set(_content_digests(dataset.train.texts, dataset.y_train))
    test_digests = _content_digests(dataset.test.texts, dataset.y_test)
    facts = {
        "documents": len(dataset.train),
        "test_documents": len(dataset.test),
        "labels": len(dataset.labels),
        "pairs": _count_unfiltered(dataset.y_train, dataset.filter_train),
        "test_pairs": _count_unfiltered(dataset.y_test, dataset.filter_test),
        "overlap": len(overlap),
        "first_overlap": overlap[0] if overlap else "",
        "twins": len(train_texts) - len(unique_texts),
        "same_text": sum(text in unique_texts for text in dataset.test.texts),
        "same_content": sum(digest in train_digests for digest in test_digests),
    }
    return pd.DataFrame([facts])


def _count_unfiltered(pairs: sp.csr_matrix, filtered: sp.csr_matrix) -> int:
    if pairs.shape != filtered.shape or (filtered.indices >= filtered.shape[1]).any():  # another rule reports it
        return int(pairs.nnz)
    return int(pairs.nnz - pairs.multiply(filtered != 0).nnz)


def _content_digests(texts: list[str], labels: sp.csr_matrix) -> Iterator[bytes]:
    """Yield a digest of the text and the labels of each document."""
    for row, text in enumerate(texts[: labels.shape[0]]):
        columns = np.sort(labels.indices[labels.indptr[row] : labels.indptr[row + 1]]).astype(np.int64)
        yield hashlib.blake2b(columns.tobytes() + text.encode(), digest_size=16).digest()


def _defects(rule: Rule, table: pd.DataFrame, rows: list[int], files: Mapping[str, str]) -> Iterator[Defect]:
    """Yield a defect for each of the failed rows of a table."""
    for index in rows:
        values: dict[str, Any] = {str(key): value for key, value in table.loc[index].items()}
        part = str(values.get("part", rule.part))
        is_texts = part.split("/")[0] == "texts" or part.endswith("/texts")
        artifact_file = f"{part}.parquet" if is_texts else f"{part}.npz"
        message = rule.message.format(value=values[rule.column], **values)
        if first := values.get(f"{rule.column}_row"):  # row i of a matrix is not line i of every file format
            message += f" (first: row {first})"
        line = int(values["row"]) if "row" in values else None
        yield Defect(files.get(part, artifact_file), message, rule.fix, line)


# --- Great Expectations --------------------------------------------------------------------------------------


def _failures(tables: dict[str, pd.DataFrame], folder: Path) -> Iterator[tuple[Rule, list[int], int]]:
    """Check the rules, write the Data Docs, and yield (failed rule, its first twenty rows, number of all its rows)."""
    with _silenced():
        import great_expectations as gx
        from great_expectations.checkpoint import UpdateDataDocsAction
        from great_expectations.core.run_identifier import RunIdentifier

        context = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = {"globally": False}
        store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(folder.absolute())}
        index = {"class_name": "DefaultSiteIndexBuilder"}
        site = {"class_name": "SiteBuilder", "store_backend": store, "site_index_builder": index}
        context.add_data_docs_site(site_name="ramen", site_config=site)
        source = context.data_sources.add_pandas("dataset")
        failed: list[tuple[Rule, list[int], int]] = []
        for name, table in tables.items():
            batch = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("all")
            rules = [rule for rule in RULES if rule.table == name]
            suite = gx.ExpectationSuite(name=name, expectations=[_expectation(rule) for rule in rules])
            definition = gx.ValidationDefinition(name=name, data=batch, suite=context.suites.add(suite))
            checkpoint = gx.Checkpoint(
                name=name,
                validation_definitions=[context.validation_definitions.add(definition)],
                actions=[UpdateDataDocsAction(name="docs", site_names=["ramen"])],
                result_format={"result_format": "SUMMARY"},
            )
            run = RunIdentifier(run_name="ingest", run_time=_EPOCH)
            result = checkpoint.run(batch_parameters={"dataframe": table}, run_id=run)
            for outcome in next(iter(result.run_results.values())).results:
                if not outcome.success:
                    rule = rules[int(outcome.expectation_config.meta["rule"])]
                    rows = list(outcome.result["partial_unexpected_index_list"])
                    failed.append((rule, rows, int(outcome.result["unexpected_count"])))
    yield from failed


def _expectation(rule: Rule) -> Any:
    import great_expectations.expectations as gxe

    number = [other for other in RULES if other.table == rule.table].index(rule)
    common = {"severity": rule.severity, "meta": {"rule": number}}
    if rule.low is None and rule.high is None:
        return gxe.ExpectCompoundColumnsToBeUnique(column_list=["part", rule.column], **common)
    return gxe.ExpectColumnValuesToBeBetween(column=rule.column, min_value=rule.low, max_value=rule.high, **common)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Suppress what Great Expectations prints, warns and logs."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    noisy = logging.getLogger("great_expectations")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    sink = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        noisy.setLevel(level)


def _make_reproducible(folder: Path) -> None:
    """Replace time stamps by the epoch, and random identifiers by numbers in the order of their appearance."""
    for image in folder.glob(_TUTORIAL_IMAGES):
        image.unlink()
    for page in sorted(folder.rglob("*.html")):
        seen: dict[str, str] = {}

        def number(match: re.Match[str], seen: dict[str, str] = seen) -> str:
            return seen.setdefault(match[0], str(uuid.UUID(int=len(seen) + 1)))

        text = _TIMESTAMP.sub(_EPOCH.strftime("%Y%m%dT%H%M%S.%fZ"), page.read_text(encoding="utf-8"))
        text = _LOCAL_EPOCH.sub(r"1970-01-01\g<1>00:00:00", text)  # the run time in the machine's time zone
        page.write_text(_UUID.sub(number, text), encoding="utf-8")
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
