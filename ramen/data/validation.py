"""Validation of a problem with Great Expectations, and its Data Docs.

Three small frames are asserted: `texts` (one row per text: part, uid, length), `relations` (one row per matrix, its
defects counted in numpy) and `problem` (one row). Texts themselves never enter a frame, so the Data Docs show none.
A failed rule of severity `critical` breaks the data; a `warning` is reported and nothing more.

The Data Docs are part of the dataset, whose digest may depend on content alone: the run time is the epoch, and the
time stamps and random identifiers that remain in the HTML are replaced.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.sparse as sp

from ramen.data.dataset import PLACEHOLDER, Dataset
from ramen.data.identity import shared_uids
from ramen.data.statistics import relations, text_lists
from ramen.errors import Defect

_TIMESTAMP = re.compile(r"\d{8}T\d{6}\.\d{6}Z")
_LOCAL_EPOCH = re.compile(r"(?:1970-01-01|1969-12-31)([ T])\d\d:\d\d:\d\d(?:Z| [A-Z\d+-]+)")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_LARGE_PICTURES = "static/images/*.gif"
"""Tutorial animations of the Data Docs, 3 MB that the pages work without."""


@dataclass(frozen=True)
class Rule:
    """One expectation: the values of a column of a frame lie between two bounds, or are unique in their part.

    Attributes:
        frame, column: what is asserted.
        says: message of a violation; `{value}` and the row's columns are filled in.
        mend: what the user can do.
        low, high: bounds, None where open; both None = unique.
        severity: `critical` breaks the data.
        part: where the defect is, if the frame's rows do not say it; as in `Problem.files`.
    """

    frame: str
    column: str
    says: str
    mend: str = ""
    low: float | None = None
    high: float | None = None
    severity: Literal["critical", "warning"] = "critical"
    part: str = ""


_FILTERED = "give some, or look at the file of filtered pairs if there is one"

RULES = (
    Rule("texts", "uid_characters", "expected an identifier, found none", low=1),
    Rule("texts", "uid", "identifier {value!r} twice", "identifiers of one file must differ"),
    Rule("texts", "characters", "expected a text, found none", "a placeholder would do", low=1),
    Rule("texts", "placeholder", f"empty text, now {PLACEHOLDER}", "", high=0, severity="warning"),
    Rule("relations", "row_surplus", "{rows} rows for {expected_rows} texts", "row i must be text i", 0, 0),
    Rule("relations", "column_surplus", "{columns} columns for {expected_columns} texts", "see its texts", 0, 0),
    Rule("relations", "out_of_range", "{value} entries outside the {columns} columns", "check the indices", high=0),
    Rule("relations", "repeated", "{value} entries twice in a row", "keep each column once", high=0),
    Rule("relations", "unequal_one", "{value} values are not 1", "matrices are binary", high=0),
    Rule("relations", "unlabelled", "{value} documents have no label", "", high=0, severity="warning"),
    Rule("problem", "documents", "expected training documents, found none", "", low=1,
         part="texts/train"),
    Rule("problem", "test_documents", "expected test documents, found none", "", low=1, part="texts/test"),
    Rule("problem", "labels", "expected at least two labels, found {value}", "", low=2, part="texts/labels"),
    Rule("problem", "pairs", "no training document has a label that counts", _FILTERED, low=1, part="labels/train"),
    Rule("problem", "test_pairs", "no test document has a label that counts", _FILTERED, low=1,
         part="labels/test"),
    Rule("problem", "overlap", "{value} test documents are training documents too (first: {first_overlap!r})",
         "remove them from one of the two", high=0, part="texts/test"),
    Rule("problem", "twins", "{value} training documents read as another one does",
         "better is one line per text, with all of its labels: these push each other's labels away",
         high=0, severity="warning", part="texts/train"),
    Rule("problem", "same_text", "{value} test documents read as a training document does ({same_content} with the "
         "same labels)", "leave them out of one of the two, or what is measured is partly learnt by heart", high=0,
         severity="warning", part="texts/test"),
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What the validation found: defects that break the data, and warnings."""

    critical: list[Defect]
    warnings: list[Defect]


def validate(problem: Dataset, folder: Path) -> Report:
    """Assert all rules; write `index.html` (Data Docs) under `folder`.

    Nothing is raised for broken data: the caller decides, with the report at hand.
    """
    folder.mkdir(parents=True, exist_ok=True)
    frames = {
        "texts": _texts_frame(problem),
        "relations": _relations_frame(problem),
        "problem": _problem_frame(problem),
    }
    report = Report([], [])
    for rule, rows, count in _failures(frames, folder):
        target = report.critical if rule.severity == "critical" else report.warnings
        target.extend(_defects(rule, frames[rule.frame], rows, problem.files))
        if count > len(rows):
            target.append(replace(target[-1], expected=f"and {count - len(rows):,} more like it", mend="", line=None))
    _make_reproducible(folder)
    return report


# --- the frames ----------------------------------------------------------------------------------------------


def _texts_frame(problem: Dataset) -> pd.DataFrame:
    parts = []
    for name, texts in text_lists(problem):
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


def _relations_frame(problem: Dataset) -> pd.DataFrame:
    rows = []
    for name, matrix, expected in relations(problem):
        row_of = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        bad = {
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
                **{key: int(mask.sum()) for key, mask in bad.items()},
                **{f"{key}_row": _first(row_of[mask]) for key, mask in bad.items()},
                "unlabelled": int(empty.sum()),
                "unlabelled_row": _first(np.flatnonzero(empty)),
            }
        )
    return pd.DataFrame(rows)


def _repeated(matrix: sp.csr_matrix, row_of: Any) -> Any:
    """Which entries stand in a row that has their column already, bool [nnz]."""
    order = np.lexsort((matrix.indices, row_of))
    again = (np.diff(matrix.indices[order]) == 0) & (np.diff(row_of[order]) == 0)
    mask = np.zeros(len(order), bool)
    mask[order[1:][again]] = True
    return mask


def _first(rows: Any) -> int:
    """One-based number of the first row, 0 if there is none."""
    return int(rows.min()) + 1 if len(rows) else 0


def _problem_frame(problem: Dataset) -> pd.DataFrame:
    trained = shared_uids(problem.test, problem.train)
    overlap = [uid for uid in problem.test.uids if uid in trained]
    read = [text for text in problem.train.texts if text != PLACEHOLDER]
    texts, content = set(read), set(_contents(problem.train.texts, problem.y_train))
    facts = {
        "documents": len(problem.train),
        "test_documents": len(problem.test),
        "labels": len(problem.labels),
        "pairs": _counting(problem.y_train, problem.filter_train),
        "test_pairs": _counting(problem.y_test, problem.filter_test),
        "overlap": len(overlap),
        "first_overlap": overlap[0] if overlap else "",
        "twins": len(read) - len(texts),
        "same_text": sum(text in texts for text in problem.test.texts),
        "same_content": sum(item in content for item in _contents(problem.test.texts, problem.y_test)),
    }
    return pd.DataFrame([facts])


def _counting(true: sp.csr_matrix, ignored: sp.csr_matrix) -> int:
    """How many of the true pairs are not to be ignored."""
    fits = true.shape == ignored.shape and (ignored.indices < ignored.shape[1]).all()
    if not fits:  # another rule is broken
        return int(true.nnz)
    return int(true.nnz - true.multiply(ignored != 0).nnz)


def _contents(texts: list[str], labels: sp.csr_matrix) -> Iterator[bytes]:
    """A digest of text and labels per document."""
    for row, text in enumerate(texts[: labels.shape[0]]):
        found = np.sort(labels.indices[labels.indptr[row] : labels.indptr[row + 1]]).astype(np.int64)
        yield hashlib.blake2b(found.tobytes() + text.encode(), digest_size=16).digest()


def _defects(rule: Rule, frame: pd.DataFrame, rows: list[int], files: Mapping[str, str]) -> Iterator[Defect]:
    for index in rows:
        values: dict[str, Any] = {str(key): value for key, value in frame.loc[index].items()}
        part = str(values.get("part", rule.part))
        own = f"{part}.parquet" if part.split("/")[0] == "texts" or part.endswith("/texts") else f"{part}.npz"
        first = values.get(f"{rule.column}_row")  # of a matrix, whose row i is not line i of every kind of file
        says = rule.says.format(value=values[rule.column], **values) + (f" (first: row {first})" if first else "")
        line = int(values["row"]) if "row" in values else None
        yield Defect(files.get(part, own), says, rule.mend, line)


# --- Great Expectations --------------------------------------------------------------------------------------


def _failures(frames: dict[str, pd.DataFrame], folder: Path) -> Iterator[tuple[Rule, list[int], int]]:
    """Run the rules, write the Data Docs, and yield (failed rule, the first twenty offending rows, how many in all)."""
    with _silence():
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
        for name, frame in frames.items():
            batch = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("all")
            rules = [rule for rule in RULES if rule.frame == name]
            suite = gx.ExpectationSuite(name=name, expectations=[_expectation(rule) for rule in rules])
            definition = gx.ValidationDefinition(name=name, data=batch, suite=context.suites.add(suite))
            checkpoint = gx.Checkpoint(
                name=name,
                validation_definitions=[context.validation_definitions.add(definition)],
                actions=[UpdateDataDocsAction(name="docs", site_names=["ramen"])],
                result_format={"result_format": "SUMMARY"},
            )
            run = RunIdentifier(run_name="ingest", run_time=_EPOCH)
            result = checkpoint.run(batch_parameters={"dataframe": frame}, run_id=run)
            for found in next(iter(result.run_results.values())).results:
                if not found.success:
                    rule = rules[int(found.expectation_config.meta["rule"])]
                    rows = list(found.result["partial_unexpected_index_list"])
                    failed.append((rule, rows, int(found.result["unexpected_count"])))
    yield from failed


def _expectation(rule: Rule) -> Any:
    import great_expectations.expectations as gxe

    order = [other for other in RULES if other.frame == rule.frame].index(rule)
    common = {"severity": rule.severity, "meta": {"rule": order}}
    if rule.low is None and rule.high is None:
        return gxe.ExpectCompoundColumnsToBeUnique(column_list=["part", rule.column], **common)
    return gxe.ExpectColumnValuesToBeBetween(column=rule.column, min_value=rule.low, max_value=rule.high, **common)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep Great Expectations' prints, warnings and log lines off the terminal."""
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
    """Replace time stamps by the epoch and random identifiers by numbers, in the order of their appearance."""
    for picture in folder.glob(_LARGE_PICTURES):
        picture.unlink()
    for page in sorted(folder.rglob("*.html")):
        seen: dict[str, str] = {}

        def number(match: re.Match[str], seen: dict[str, str] = seen) -> str:
            return seen.setdefault(match[0], str(uuid.UUID(int=len(seen) + 1)))

        text = _TIMESTAMP.sub(_EPOCH.strftime("%Y%m%dT%H%M%S.%fZ"), page.read_text(encoding="utf-8"))
        text = _LOCAL_EPOCH.sub(r"1970-01-01\g<1>00:00:00", text)  # the run time in the machine's time zone
        page.write_text(_UUID.sub(number, text), encoding="utf-8")
    for folder_ in sorted(folder.rglob("*"), reverse=True):
        if folder_.is_dir() and not any(folder_.iterdir()):
            folder_.rmdir()
