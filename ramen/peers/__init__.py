"""Peers: what a user would otherwise choose, ranked and measured on the same split as a trained model.

A peer is a module with a function `fit(task)`, which trains on the dataset's training documents and returns a function
that ranks the test documents. Filter, candidates and metrics are those of a trained model.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ramen import config
from ramen.data.dataset import Dataset

Rank = Callable[[], tuple[NDArray[np.int64], NDArray[np.float32]]]
"""Ranks the test documents: int64 [N', retrieve] label ids, best first, padded with L; float32 scores, padded with
-inf. Filtered pairs are still in it."""


@dataclass(frozen=True)
class Task:
    """What a peer is given.

    Attributes:
        problem: the dataset; anchor sets are not used.
        encoder, training, scoring: config sections; a peer reads those that `Peer.sections` names.
        work: an empty folder for temporary files.
        seconds: time limit of training, for a peer that is `timed`.
    """

    problem: Dataset
    encoder: config.EncoderConfig
    training: config.TrainingConfig
    scoring: config.ScoringConfig
    work: Path
    seconds: float = 0.0


@dataclass(frozen=True)
class Peer:
    """One peer.

    Attributes:
        module: module with `fit(task) -> Rank`.
        sections: config sections that its result depends on.
        packages: packages that it imports, outside ramen's own dependencies.
        timed: it trains for a given time.
        pecos: it runs in the interpreter that has libpecos.
    """

    module: str
    sections: tuple[str, ...] = ("scoring",)
    packages: tuple[str, ...] = ()
    timed: bool = False
    pecos: bool = False

    def fit(self, task: Task) -> Rank:
        """Train on the training documents; returns the function that ranks the test documents."""
        rank: Rank = importlib.import_module(self.module).fit(task)
        return rank

    def obstacle(self) -> str:
        """Why the peer cannot run here and what to do; empty if it can."""
        if missing := [name for name in self.packages if importlib.util.find_spec(name) is None]:
            return f"{missing[0]} is not installed: pip install 'ramen[peers]'"
        if self.pecos:
            from ramen.peers import libpecos

            return libpecos.obstacle()
        return ""


TRAINED = ("encoder", "training", "scoring")
PEERS = {
    "tfidf": Peer("ramen.peers.tfidf"),
    "untrained": Peer("ramen.peers.untrained", ("encoder", "scoring")),
    "sentence-transformers": Peer(
        "ramen.peers.sentence_transformers_trainer",
        TRAINED,
        ("sentence_transformers", "datasets", "accelerate"),
        timed=True,
    ),
    "xr-linear": Peer("ramen.peers.xr_linear", ("training", "scoring"), pecos=True),
    "xr-transformer": Peer("ramen.peers.xr_transformer", TRAINED, pecos=True),
}
"""Name -> peer."""
