"""MOGIC's oracle: an encoder that reads metadata in addition to the texts, and its vectors of all documents and labels.

The oracle is trained first, with the same base algorithm and without graphs, on texts followed by the texts of their
anchors (MOGIC). Its vectors are computed once; afterwards it is not needed, and it is never served. It reads no edge of
a test document, and no edge that the walk added, since those are guesses. An item's text must not name what it is to be
matched with: a document's edge to an anchor that is one of its labels is left out, and so is a label's edge to an
anchor that is one of its documents.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.artifacts import Artifact, Draft
from ramen.config import Sampling
from ramen.data.dataset import Dataset, Side, Texts
from ramen.errors import ConfigError
from ramen.files import read_array
from ramen.graph.cleaning import match_anchors, remove_pairs
from ramen.graph.metadata import Graphs, sampling_weights
from ramen.objective.guidance import OracleVectors
from ramen.sampling import keyed_rng
from ramen.tracking import Tracker
from ramen.training.distributed import Processes
from ramen.training.heldout import split_held_out
from ramen.training.inputs import select_anchor_sets, training_graphs
from ramen.training.setup import TrainingSections, build_trainer

FOLDER = "oracle"
"""Folder of the oracle's checkpoints in the work directory, and name of its tracked run."""
FILES = {"documents": "oracle_documents.npy", "labels": "oracle_labels.npy"}
"""Files in the artifact `warm_model`, which is never served; the artifact `model` has none."""


def write_oracle(folder: Path, oracle: OracleVectors) -> None:
    """Write the oracle's vectors next to a warm model."""
    for name, file in FILES.items():
        np.save(folder / file, getattr(oracle, name))


def read_oracle(folder: Path) -> OracleVectors:
    """Open the files of `write_oracle` as memory maps."""
    return OracleVectors(
        **{name: read_array(folder / file, "f", (None, None), mapped=True) for name, file in FILES.items()}
    )


def train_oracle(
    dataset: Artifact, graph: Artifact, draft: Draft, sections: TrainingSections, track: Tracker, processes: Processes
) -> tuple[OracleVectors, dict[str, float]]:
    """Train the oracle and compute its vectors.

    Args:
        dataset, graph: artifacts to train on.
        draft: draft of the warm model; the oracle's checkpoints go to its work directory.
        sections: sections of the warm-up.
        track: gets a child run.
        processes: the processes that train together.

    Returns:
        The oracle, and its loss and held-out P@1 as metrics `oracle/...`.

    Raises:
        ConfigError: there is no anchor set, or `guidance.anchor_sets` names an unknown one.
        Interrupted: SIGTERM or Ctrl-C; a checkpoint was saved.
    """
    guidance, objective = sections.guidance, sections.objective
    plain = Dataset.read(dataset.path)
    if not plain.anchor_sets:
        raise ConfigError(
            "guidance.enabled: the dataset has no anchor sets, so an oracle would read the same texts as the encoder; "
            "set guidance.enabled=false"
        )
    held_out, _ = split_held_out(plain, sections.training)
    graphs = select_anchor_sets(
        training_graphs(graph.path, plain, held_out), guidance.anchor_sets, "guidance.anchor_sets"
    )
    seed, epochs = sections.training.seed, guidance.epochs
    texts = add_anchor_texts(plain, graphs, objective.anchor_sampling, guidance.max_length, seed)
    without_graphs = replace(
        sections,
        objective=objective.model_copy(update={"graphs": False, "augment_labels": False}),
        bandit=sections.bandit.model_copy(update={"enabled": False}),
        training=sections.training.model_copy(update={"epochs": epochs, "warmup_epochs": epochs, "max_minutes": 0.0}),
        guidance=guidance.model_copy(update={"enabled": False}),
    )
    with track.child(FOLDER, {"ramen.phase": FOLDER}) as child:
        oracle_draft = Draft(draft.path, draft.work / FOLDER, draft.task)
        trainer = build_trainer(
            dataset, graph, oracle_draft, sections.encoder.name, without_graphs, child, processes,
            texts=texts, max_length=guidance.max_length,
        )  # fmt: skip
        with trainer.interruptible():
            trainer.resume()
            trainer.train(FOLDER, epochs)
            trainer.save()  # the rest is short, and is repeated after an interruption
            oracle = OracleVectors(
                trainer.embed_role("documents").astype(np.float16), trainer.embed_role("labels").astype(np.float16)
            )
        metrics = trainer.last_metrics()
        child.log(metrics)
    return oracle, {f"{FOLDER}/{name}": value for name, value in metrics.items()}


def add_anchor_texts(dataset: Dataset, graphs: Graphs, sampling: Sampling, max_anchors: int, seed: int) -> Dataset:
    """The dataset as the oracle reads it: every text followed by the texts of its anchors, in random order.

    Args:
        dataset: documents, labels and anchor sets.
        graphs: cleaned graphs, without test documents.
        sampling: "inverse_sqrt_degree" tends to put specific anchors before hubs, since a long list is truncated.
        max_anchors: anchors per item (each takes a token or more, so the encoder would truncate the rest).
        seed: of the order.

    Returns:
        The same dataset with longer texts and without anchor sets.
    """
    true = {Side.DOCUMENT: dataset.y_train, Side.LABEL: sp.csr_matrix(dataset.y_train.T)}
    partners = {Side.DOCUMENT: dataset.labels, Side.LABEL: dataset.train}
    extended: dict[Side, Texts] = {}
    for side, items in ((Side.DOCUMENT, dataset.train), (Side.LABEL, dataset.labels)):
        edges: list[tuple[NDArray[np.int64], NDArray[np.float64], NDArray[Any]]] = []
        for name in sorted(graphs):
            graph, anchors = graphs[name][side], dataset.anchor_sets[name].texts
            allowed = remove_pairs(graph.original_csr(), true[side], match_anchors(partners[side], anchors))
            weights = sampling_weights(graphs[name], sampling)
            rows = np.repeat(np.arange(allowed.shape[0]), np.diff(allowed.indptr))
            keys = keyed_rng(seed, f"oracle/{name}/{side}").exponential(size=allowed.nnz)
            keys = keys if weights is None else keys / weights[allowed.indices]
            edges.append((rows, keys, np.array(anchors.texts, object)[allowed.indices]))
        extended[side] = Texts(items.uids, _append_texts(items.texts, edges, max_anchors))
    return replace(dataset, train=extended[Side.DOCUMENT], labels=extended[Side.LABEL], anchor_sets={})


def _append_texts(
    texts: list[str], edges: list[tuple[NDArray[np.int64], NDArray[np.float64], NDArray[Any]]], limit: int
) -> list[str]:
    """Append to each text the texts of its edges by ascending key, at most `limit`.

    Args:
        texts: one per row.
        edges: per set, the rows, keys and anchor texts of its edges.
        limit: texts appended per row.
    """
    if not edges:
        return texts
    rows, keys, anchor_texts = (np.concatenate(part) for part in zip(*edges, strict=True))
    order = np.lexsort((keys, rows))
    ends = np.cumsum(np.bincount(rows, minlength=len(texts)))
    starts = np.concatenate([[0], ends[:-1]])
    return [
        " ".join([text, *anchor_texts[order[start : min(end, start + limit)]]])
        for text, start, end in zip(texts, starts.tolist(), ends.tolist(), strict=True)
    ]
