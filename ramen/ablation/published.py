"""Results reported in the papers (published.csv, in percent), to compare with one's own."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("published.csv")


@cache
def published(dataset: str, table: str = "") -> dict[tuple[str, str], dict[str, float]]:
    """Return the published results of a data set.

    Args:
        dataset: name in the Extreme Classification Repository, e.g. LF-WikiSeeAlsoTitles-320K.
        table: an ablation's table, from the column `table`; "" = the main tables.

    Returns:
        (source, method) -> metric -> value; empty for a data set that no paper reports.
    """
    results: dict[tuple[str, str], dict[str, float]] = {}
    with FILE.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["dataset"] == dataset and row["table"] == table:
                results.setdefault((row["source"], row["method"]), {})[row["metric"]] = float(row["value"])
    return results
