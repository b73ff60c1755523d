"""Peers: other methods (TF-IDF, sentence-transformers, XR-Linear, ...), trained and evaluated on the same split.

A peer is a module with a function `fit(task)` that trains on the training documents and returns a function that ranks
the test documents. Filters, candidate labels and metrics are those of a RAMEN model.
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
"""Ranks the test documents without filters: label ids int64 [N', retrieve], best first, padded with L; scores
float32 of the same shape, padded with -inf."""


@dataclass(frozen=True)
class Task:
    """Input of a peer.

    Attributes:
        problem: the dataset; peers do not use its anchor sets.
        encoder, training, scoring: config sections; a peer reads those in `Peer.sections`.
        work: an empty folder for temporary files.
        seconds: time limit of training for peers with `timed`.
    """

    problem: Dataset
    encoder: config.EncoderConfig
    training: config.TrainingConfig
    scoring: config.ScoringConfig
    work: Path
    seconds: float = 0.0


@dataclass(frozen=True)
class Peer:
    """A peer and its requirements.

    Attributes:
        module: module with `fit(task) -> Rank`.
        sections: config sections that the result depends on.
        packages: required packages that are not dependencies of ramen.
        timed: true if the peer trains for a given time.
        pecos: true if the peer runs in the interpreter with libpecos.
    """

    module: str
    sections: tuple[str, ...] = ("scoring",)
    packages: tuple[str, ...] = ()
    timed: bool = False
    pecos: bool = False

    def fit(self, task: Task) -> Rank:
        """Train on the training documents and return the function that ranks the test documents."""
        rank: Rank = importlib.import_module(self.module).fit(task)
        return rank

    def obstacle(self) -> str:
        """Return why the peer cannot run here and what to do; empty if it can run."""
        if missing := [name for name in self.packages if importlib.util.find_spec(name) is None]:
            return f"{missing[0]} is not installed: pip install 'ramen[peers]'"
        if self.pecos:
            from ramen.peers import libpecos

            return libpecos.obstacle()
        return ""


ENCODER_SECTIONS = ("encoder", "training", "scoring")
PEERS = {
    "tfidf": Peer("ramen.peers.tfidf"),
    "untrained": Peer("ramen.peers.untrained", ("encoder", "scoring")),
    "sentence-transformers": Peer(
        "ramen.peers.sentence_transformers_trainer",
        ENCODER_SECTIONS,
        ("sentence_transformers", "datasets", "accelerate"),
        timed=True,
    ),
    "xr-linear": Peer("ramen.peers.xr_linear", ("training", "scoring"), pecos=True),
    "xr-transformer": Peer("ramen.peers.xr_transformer", ENCODER_SECTIONS, pecos=True),
}
"""Peer name -> peer."""
