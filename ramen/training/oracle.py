"""MOGIC's oracle: an encoder that reads metadata beside the texts, and its vectors of all documents and labels.

It is trained first, by the same base algorithm and without graphs, on texts followed by those of their anchors
(MOGIC). Its vectors are computed once; from then on it is not needed, and nothing of it is served. It reads what the
graph holds, that is, nothing of a test document, and no walked edges: they are guesses. Nor may an item's text name
what it is to be matched with: a document's edge to an anchor that is one of its labels is left out, and a label's edge
to an anchor that is one of its documents.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.artifacts import Artifact, Draft, read_array
from ramen.config import Sampling
from ramen.data.dataset import Dataset, Texts
from ramen.errors import ConfigError
from ramen.graph.cleaning import anchors_of, remove_pairs
from ramen.graph.metadata import Graphs, drawing_weights
from ramen.objective.guidance import Oracle
from ramen.sampling import keyed_rng
from ramen.tracking import Tracker
from ramen.training.distributed import Processes
from ramen.training.setup import Session, TrainingSections, chosen_sets, split_validation, training_graphs

FOLDER = "oracle"
"""Of its checkpoints in the work directory, and its name as a tracked run."""
FILES = {"documents": "oracle_documents.npy", "labels": "oracle_labels.npy"}
"""In the artifact `warm_model`, which is never served; the artifact `model` has none."""


def write_oracle(folder: Path, oracle: Oracle) -> None:
    """Write both tables beside a warmed-up model."""
    for name, file in FILES.items():
        np.save(folder / file, getattr(oracle, name))


def read_oracle(folder: Path) -> Oracle:
    """Open what `write_oracle` wrote; rows come from the disk as steps ask for them."""
    return Oracle(**{name: read_array(folder / file, "f", (None, None), mapped=True) for name, file in FILES.items()})


def train_oracle(
    dataset: Artifact, graph: Artifact, draft: Draft, settings: TrainingSections, track: Tracker, processes: Processes
) -> tuple[Oracle, dict[str, float]]:
    """Train the oracle and ask it for all its vectors.

    Args:
        dataset, graph: what it reads.
        draft: of the warm-up, in whose work directory its checkpoints go.
        settings: of the warm-up.
        track: gets a child run.
        processes: that train together.

    Returns:
        Its tables, and its loss and held-out P@1 as metrics `oracle/...`.

    Raises:
        ConfigError: there is no anchor set, or `guidance.anchor_sets` names one that is not there.
        Interrupted: asked to stop; a checkpoint was saved.
    """
    guidance, objective = settings.guidance, settings.objective
    problem = Dataset.read(dataset.path)
    if not problem.anchor_sets:
        raise ConfigError(
            "guidance.enabled: the dataset has no anchor sets, so an oracle would read what the encoder does"
        )
    held_out, _ = split_validation(problem, settings.training)
    known = training_graphs(graph.path, problem, held_out)
    graphs = chosen_sets(known, guidance.anchor_sets, "guidance.anchor_sets")
    reading = enriched(problem, graphs, objective.anchor_sampling, guidance.max_length, settings.training.seed)
    epochs = guidance.epochs
    own = replace(
        settings,
        objective=objective.model_copy(update={"graphs": False, "augment_labels": False}),
        bandit=settings.bandit.model_copy(update={"enabled": False}),
        training=settings.training.model_copy(update={"epochs": epochs, "warmup_epochs": epochs, "max_minutes": 0.0}),
        guidance=guidance.model_copy(update={"enabled": False}),
    )
    with track.child(FOLDER, {"ramen.phase": FOLDER}) as child:
        place = Draft(draft.path, draft.work / FOLDER, draft.task)
        session = Session(
            dataset, graph, place, settings.encoder.name, own, child, processes, reading,
            max_length=guidance.max_length,
        )  # fmt: skip
        with session.interruptible():
            session.resume()
            session.train(FOLDER, epochs)
            session.save()  # what follows is short, and done again after a stop
            told = Oracle(
                session.embed_role("documents").astype(np.float16), session.embed_role("labels").astype(np.float16)
            )
        metrics = session.last_metrics()
        child.log(metrics)
    return told, {f"{FOLDER}/{name}": value for name, value in metrics.items()}


def enriched(problem: Dataset, graphs: Graphs, sampling: Sampling, most: int, seed: int) -> Dataset:
    """The problem as the oracle reads it: every text followed by those of its anchors, in random order.

    Args:
        problem: documents, labels and anchor sets.
        graphs: cleaned graphs, without test documents.
        sampling: "inverse_sqrt_degree" puts specific anchors first more often than hubs, for a long list is cut.
        most: anchors of an item at most (each has a token or more, so that the encoder would cut the rest anyway).
        seed: of the order.

    Returns:
        The same problem with longer texts and no anchor sets.
    """
    true = {"train": problem.y_train, "labels": sp.csr_matrix(problem.y_train.T)}
    other = {"train": problem.labels, "labels": problem.train}
    read: dict[str, Texts] = {}
    for side, items in (("train", problem.train), ("labels", problem.labels)):
        edges: list[tuple[NDArray[np.int64], NDArray[np.float64], NDArray[Any]]] = []
        for name in sorted(graphs):
            graph, anchors = graphs[name][side], problem.anchor_sets[name].texts
            own = remove_pairs(graph.given(), true[side], anchors_of(other[side], anchors))
            weights = drawing_weights(graphs[name], sampling)
            rows = np.repeat(np.arange(own.shape[0]), np.diff(own.indptr))
            race = keyed_rng(seed, f"oracle/{name}/{side}").exponential(size=own.nnz)
            race = race if weights is None else race / weights[own.indices]
            edges.append((rows, race, np.array(anchors.texts, object)[own.indices]))
        read[side] = Texts(items.uids, _followed(items.texts, edges, most))
    return replace(problem, train=read["train"], labels=read["labels"], anchor_sets={})


def _followed(
    texts: list[str], edges: list[tuple[NDArray[np.int64], NDArray[np.float64], NDArray[Any]]], most: int
) -> list[str]:
    """Each text and behind it the texts of its edges by ascending key, `most` of them at most.

    `edges`: per set the rows, keys and anchors' texts of its edges.
    """
    if not edges:
        return texts
    rows, keys, names = (np.concatenate(part) for part in zip(*edges, strict=True))
    order = np.lexsort((keys, rows))
    ends = np.cumsum(np.bincount(rows, minlength=len(texts)))
    starts = np.concatenate([[0], ends[:-1]])
    return [
        " ".join([text, *names[order[start : min(end, start + most)]]])
        for text, start, end in zip(texts, starts.tolist(), ends.tolist(), strict=True)
    ]
