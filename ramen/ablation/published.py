"""What the papers report, to be set beside one's own figures: published.csv, in percent."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("published.csv")


@cache
def published(dataset: str, table: str = "") -> dict[tuple[str, str], dict[str, float]]:
    """What the papers report of a data set: (source, method) -> metric -> value; {} for a data set of no paper.

    Args:
        dataset: as the Extreme Classification Repository spells it, e.g. LF-WikiSeeAlsoTitles-320K.
        table: an ablation's table, as the file's column of that name has it; "" = the main tables.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    with FILE.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["dataset"] == dataset and row["table"] == table:
                found.setdefault((row["source"], row["method"]), {})[row["metric"]] = float(row["value"])
    return found
