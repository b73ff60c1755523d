"""Table rows of the gains between pipeline runs, for `ramen compare`."""

from __future__ import annotations

from collections.abc import Sequence

from ramen.cli import tables
from ramen.evaluation.comparison import Comparison


def gain_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return rows `gain, run, over, ...` and `s.e.` under the columns of `ramen compare`."""
    cells = []
    for comparison in (comparison for comparison in comparisons if comparison.points):
        points, errors = (
            [values.get(key) for key in tables.COLUMNS.values()] for values in (comparison.points, comparison.errors)
        )
        over = f"over {comparison.over[:8]}"
        cells.append(["gain", comparison.run[:8], over, "", *tables.gain_cells(points, errors)])
        if comparison.errors:
            cells.append(["s.e.", "", "", "", *tables.error_cells(errors)])
    return cells
