"""Source `debian`: the package metadata of a Debian or Ubuntu machine as an extreme-classification problem.

Documents are the packages that suggest or recommend packages of the archive, labels the packages they suggest or
recommend. Text of both: `name: synopsis`, for example "python3-numpy: Fast array facility to the Python 3 language";
the name carries what the one-line synopsis takes as known. Anchor sets: `depends` (the packages it depends on),
`rdepends` (those that depend on it), `debtags`. Suggests and Recommends never become edges of an anchor set.

Train and test are split by source package, so that siblings (foo, foo-doc, foo-data) never straddle.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen import config
from ramen.data.dataset import AnchorSet, Dataset, Texts
from ramen.data.sources import missing
from ramen.data.sources.packages import Package, fetch, read_packages
from ramen.data.subset import choose, share
from ramen.errors import DataError, Defect

_UNTAGGED = re.compile(r"special::.*|.*[:]TODO")
"""Debtags that say how the tagging went, nothing about the package."""


def fetch_if_missing(settings: config.DataConfig) -> bool:
    """Write the snapshot `settings.path` from the machine's package lists if it is not there.

    Raises:
        DataError: the machine has no package lists and cannot get them.
    """
    path = Path(settings.path)
    if os.path.lexists(path):
        return False
    fetch(path)
    return True


def anchor_set_names(path: Path) -> Sequence[str]:
    """Names of the anchor sets; an archive may lack some."""
    return ("debtags", "depends", "rdepends")


def read(settings: config.DataConfig) -> Dataset:
    """Read a snapshot (or a Packages file) and pose the problem.

    Raises:
        DataError: no such file (`ramen fetch` writes it), broken lines, or nothing to learn from.
    """
    path = Path(settings.path)
    if not path.is_file():
        raise DataError(missing(settings))
    archive = {package.name: package for package in read_packages(path)}
    problem = build(archive, settings)
    if not len(problem.train) or not len(problem.test):
        expected = (
            f"expected packages of several sources that suggest or recommend others, found {len(problem.train)} "
            f"training and {len(problem.test)} test documents among {len(archive)} packages"
        )
        raise DataError(Defect(settings.path, expected, "use a whole archive, or raise data.max_documents"))
    return problem


def build(archive: dict[str, Package], settings: config.DataConfig) -> Dataset:
    """Pose the problem on an archive (name -> package, in the order of names)."""
    targets = {name: _targets(package, archive) for name, package in archive.items()}
    documents = [name for name, found in targets.items() if found]
    kept = choose([archive[name].source for name in documents], settings.max_documents, seed=settings.seed)
    documents = [name for name, keep in zip(documents, kept, strict=True) if keep]
    held_out = {name: _is_test(archive[name].source, settings) for name in documents}
    train = [name for name in documents if not held_out[name]]
    test = [name for name in documents if held_out[name]]
    labels = sorted({label for name in documents for label in targets[name]})
    position = {name: i for i, name in enumerate(labels)}
    return Dataset(
        _texts(train, archive),
        _texts(test, archive),
        _texts(labels, archive),
        _matrix(train, targets, position),
        _matrix(test, targets, position),
        sp.csr_matrix((len(train), len(labels)), dtype=np.float32),
        sp.csr_matrix((len(test), len(labels)), dtype=np.float32),
        _anchor_sets(archive, train, test, labels),
        groups=_numbered_sources(train, archive),
        test_groups=_numbered_sources(test, archive),
    )


def _targets(package: Package, archive: dict[str, Package]) -> set[str]:
    """Packages of the archive that a package suggests or recommends, itself excepted."""
    return {name for name in (*package.recommends, *package.suggests) if name in archive} - {package.name}


def _is_test(source: str, settings: config.DataConfig) -> bool:
    return share(source, seed=settings.seed, purpose="test") < settings.test_fraction


def _numbered_sources(names: Sequence[str], archive: dict[str, Package]) -> NDArray[np.int64]:
    """The number of each package's source package."""
    return np.unique([archive[name].source for name in names], return_inverse=True)[1].astype(np.int64)


def _texts(names: Sequence[str], archive: dict[str, Package]) -> Texts:
    return Texts(list(names), [archive[name].text for name in names])


def _matrix(rows: Sequence[str], columns: Mapping[str, Iterable[str]], position: Mapping[str, int]) -> sp.csr_matrix:
    """Binary CSR, one row for each of `rows`, with the columns that have a position."""
    found = [sorted(position[name] for name in columns.get(row, ()) if name in position) for row in rows]
    indptr = np.cumsum([0, *map(len, found)])
    indices = np.fromiter((column for row in found for column in row), np.int32, indptr[-1])
    return sp.csr_matrix((np.ones(len(indices), np.float32), indices, indptr), shape=(len(rows), len(position)))


def _anchor_sets(
    archive: dict[str, Package], train: Sequence[str], test: Sequence[str], labels: Sequence[str]
) -> dict[str, AnchorSet]:
    """Anchors are those that a training document or a label has an edge to; a set without any is left out."""
    depends = {name: {other for other in package.depends if other in archive} for name, package in archive.items()}
    rdepends: dict[str, set[str]] = defaultdict(set)
    for name, others in depends.items():
        for other in others:
            rdepends[other].add(name)
    debtags = {name: [tag for tag in package.tags if not _UNTAGGED.fullmatch(tag)] for name, package in archive.items()}
    sets: dict[str, AnchorSet] = {}
    for kind, edges in (("debtags", debtags), ("depends", depends), ("rdepends", rdepends)):
        names = sorted({name for row in (*train, *labels) for name in edges.get(row, ())})
        if not names:
            continue  # Ubuntu's archive, for one, has no debtags
        position = {name: i for i, name in enumerate(names)}
        texts = Texts(names, [tag_text(tag) for tag in names]) if kind == "debtags" else _texts(names, archive)
        sets[kind] = AnchorSet(texts, *(_matrix(rows, edges, position) for rows in (train, labels, test)))
    return sets


def tag_text(tag: str) -> str:
    """A debtag in words: `devel::lang:perl` becomes "devel: lang perl"."""
    facet, _, value = tag.partition("::")
    return f"{facet}: {value.replace(':', ' ').replace('-', ' ')}" if value else facet
