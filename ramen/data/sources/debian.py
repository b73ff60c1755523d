"""Source `debian`: the package metadata of a Debian or Ubuntu machine.

Documents are the packages that suggest or recommend packages of the archive; their labels are the suggested or
recommended packages. The text of both is `name: synopsis`, for example "python3-numpy: Fast array facility to the
Python 3 language": the one-line synopsis often assumes that the reader knows the name. Anchor sets: `depends` (packages
that the package depends on), `rdepends` (packages that depend on it) and `debtags`. Suggests and Recommends are never
edges of an anchor set.

Train and test are split by source package, so that siblings (foo, foo-doc, foo-data) are in the same part.
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
from ramen.data.sources import path_defect
from ramen.data.sources.packages import Package, fetch, read_packages
from ramen.data.subset import choose_documents, hash_fraction
from ramen.errors import DataError, Defect

_META_TAG = re.compile(r"special::.*|.*[:]TODO")
"""Debtags about the state of the tagging instead of the package."""


def fetch_if_missing(settings: config.DataConfig) -> bool:
    """Write the snapshot `settings.path` from the machine's package lists if it is missing; return whether it was.

    Raises:
        DataError: the machine has no package lists and cannot get them.
    """
    path = Path(settings.path)
    if os.path.lexists(path):
        return False
    fetch(path)
    return True


def anchor_set_names(path: Path) -> Sequence[str]:
    """Return the names of the anchor sets; an archive may lack some."""
    return ("debtags", "depends", "rdepends")


def read(settings: config.DataConfig) -> Dataset:
    """Read a snapshot or a Packages file.

    Raises:
        DataError: the file is missing or has broken lines, or there are no training or test documents.
    """
    path = Path(settings.path)
    if not path.is_file():
        raise DataError(path_defect(settings))
    archive = {package.name: package for package in read_packages(path)}
    dataset = build_dataset(archive, settings)
    if not len(dataset.train) or not len(dataset.test):
        expected = (
            f"expected packages of several sources that suggest or recommend others, found {len(dataset.train)} "
            f"training and {len(dataset.test)} test documents in {len(archive)} packages"
        )
        raise DataError(Defect(settings.path, expected, "use a whole archive, or raise data.max_documents"))
    return dataset


def build_dataset(archive: dict[str, Package], settings: config.DataConfig) -> Dataset:
    """Build the dataset of an archive (name -> package, sorted by name)."""
    targets = {name: _targets(package, archive) for name, package in archive.items()}
    documents = [name for name, labels in targets.items() if labels]
    kept = choose_documents([archive[name].source for name in documents], settings.max_documents, seed=settings.seed)
    documents = [name for name, keep in zip(documents, kept, strict=True) if keep]
    is_test = {name: _is_test(archive[name].source, settings) for name in documents}
    train = [name for name in documents if not is_test[name]]
    test = [name for name in documents if is_test[name]]
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
        groups=_number_sources(train, archive),
        test_groups=_number_sources(test, archive),
    )


def _targets(package: Package, archive: dict[str, Package]) -> set[str]:
    """Return the other packages of the archive that a package suggests or recommends."""
    return {name for name in (*package.recommends, *package.suggests) if name in archive} - {package.name}


def _is_test(source: str, settings: config.DataConfig) -> bool:
    return hash_fraction(source, seed=settings.seed, purpose="test") < settings.test_fraction


def _number_sources(names: Sequence[str], archive: dict[str, Package]) -> NDArray[np.int64]:
    """Return the number of the source package of each package, int64."""
    return np.unique([archive[name].source for name in names], return_inverse=True)[1].astype(np.int64)


def _texts(names: Sequence[str], archive: dict[str, Package]) -> Texts:
    return Texts(list(names), [archive[name].text for name in names])


def _matrix(rows: Sequence[str], edges: Mapping[str, Iterable[str]], position: Mapping[str, int]) -> sp.csr_matrix:
    """Return the edges of `rows` as binary CSR; names without a position (column) are left out."""
    columns = [sorted(position[name] for name in edges.get(row, ()) if name in position) for row in rows]
    indptr = np.cumsum([0, *map(len, columns)])
    indices = np.fromiter((column for row in columns for column in row), np.int32, indptr[-1])
    return sp.csr_matrix((np.ones(len(indices), np.float32), indices, indptr), shape=(len(rows), len(position)))


def _anchor_sets(
    archive: dict[str, Package], train: Sequence[str], test: Sequence[str], labels: Sequence[str]
) -> dict[str, AnchorSet]:
    """Build the sets of the anchors that a training document or a label links to; empty sets are left out."""
    depends = {name: {other for other in package.depends if other in archive} for name, package in archive.items()}
    rdepends: dict[str, set[str]] = defaultdict(set)
    for name, others in depends.items():
        for other in others:
            rdepends[other].add(name)
    debtags = {name: [tag for tag in package.tags if not _META_TAG.fullmatch(tag)] for name, package in archive.items()}
    sets: dict[str, AnchorSet] = {}
    for kind, edges in (("debtags", debtags), ("depends", depends), ("rdepends", rdepends)):
        names = sorted({name for row in (*train, *labels) for name in edges.get(row, ())})
        if not names:
            continue  # Ubuntu's archive has no debtags
        position = {name: i for i, name in enumerate(names)}
        texts = Texts(names, [describe_tag(tag) for tag in names]) if kind == "debtags" else _texts(names, archive)
        sets[kind] = AnchorSet(texts, *(_matrix(rows, edges, position) for rows in (train, labels, test)))
    return sets


def describe_tag(tag: str) -> str:
    """Return a debtag in words: "devel: lang perl" for `devel::lang:perl`."""
    facet, _, value = tag.partition("::")
    return f"{facet}: {value.replace(':', ' ').replace('-', ' ')}" if value else facet
