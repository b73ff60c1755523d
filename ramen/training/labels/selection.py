"""What held-out documents say of other vectors for the labels: how a label context or a classifier is chosen.

Two things are asked: the discounted gain (that of nDCG), which looks at the top of the ranking, and the log rank, which
looks at all of it. P@1 would say too little: of a few hundred documents, its best share is mostly chance.

Letters: V held-out documents, L labels, D width, S shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.data.sparse import without
from ramen.errors import warn
from ramen.sampling import keyed_rng
from ramen.training.setup import Session
from ramen.training.trainer import count_above

Vectors = NDArray[np.float32]

DOCUMENTS = 2000
"""Held-out documents asked at most."""
FEWEST = 20
"""And at least: fewer agree by chance too often, and one of them has no error at all."""
CHUNK = 1 << 25
"""Scores held at a time (128 MB)."""


@dataclass(frozen=True)
class HeldOutRanking:
    """Held-out documents that have a label.

    Attributes:
        rows: int64 [V], ascending rows of the training matrix.
        documents: float32 [V, D].
        y, ignored: CSR V x L.
        unseen: int64, labels that do not compete, for training must not see them (zero-shot).
    """

    rows: NDArray[np.int64]
    documents: Vectors
    y: sp.csr_matrix
    ignored: sp.csr_matrix
    unseen: NDArray[np.int64]

    @classmethod
    def of(cls, session: Session, otherwise: str) -> HeldOutRanking | None:
        """A sample of the session's held-out documents that have a label, the same each time.

        Args:
            session: the trained encoder and its held-out documents.
            otherwise: what is done without judges, for the warning.

        Returns:
            None, and a warning, if there are fewer than `FEWEST`.

        Raises:
            Interrupted: asked to stop; a checkpoint was saved.
        """
        rng, problem, held_out = keyed_rng(session.training.seed, "context"), session.problem, session.validation
        positives = without(problem.y_train, session.ignored)
        rows = held_out.documents[np.diff(positives.indptr)[held_out.documents] > 0]
        if len(rows) < FEWEST:
            few = f"{otherwise}: {len(rows)} held-out documents have a label, and {FEWEST} are needed to choose by"
            warn(f"{few}; raise training.validation_fraction")
            return None
        rows = np.sort(rng.permutation(rows)[:DOCUMENTS])
        documents = session.embed(session.texts.roles["documents"][rows])
        return cls(rows, documents, positives[rows], session.ignored[rows], problem.unseen)

    def ask(
        self, labels: Vectors, others: Vectors, combine: Callable[[Vectors, Vectors, float], Vectors], shares: Vectors
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Means of 1 / log2(1 + rank) and of log2(rank) over each document's labels, for each share: float64 [S, V].

        A label's rank is that among the wrong ones.

        Args:
            labels, others: float32 [L, D]; two products serve all shares.
            combine: scores [n, L] by the first, by the second, and a share, to scores [n, L].
            shares: float [S].
        """
        gain, log_rank = np.zeros((2, len(shares), len(self.rows)))
        step = max(1, CHUNK // len(labels))
        for start in range(0, len(self.rows), step):
            part = slice(start, start + step)
            plain, moved = self.documents[part] @ labels.T, self.documents[part] @ others.T
            left = self.ignored[part].tocoo()
            for number, share in enumerate(shares):
                scores = combine(plain, moved, float(share))
                scores[left.row, left.col] = -np.inf
                scores[:, self.unseen] = -np.inf
                for row, found in enumerate(scores):
                    document = start + row
                    true = self.y.indices[self.y.indptr[document] : self.y.indptr[document + 1]]
                    theirs = found[true]
                    found[true] = -np.inf
                    above = count_above(found, theirs)
                    gain[number, document] = (1.0 / np.log2(2.0 + above)).mean()
                    log_rank[number, document] = np.log2(1.0 + above).mean()
        return gain, log_rank
