"""Train and apply models of libpecos: `python pecos_worker.py train|predict FOLDER`.

This script runs in a separate interpreter and must not import ramen. `FOLDER` holds plan.json, x_train.npz,
y_train.npz, x_test.npz, train.json and test.json (texts); `predict` writes scores.npz, CSR test documents x labels.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

BEAM = 50
"""Clusters kept per level in prediction; the default of libpecos (10) has a lower recall at 100."""

WORKERS = 1
"""Processes that build batches; libpecos also uses it as a number of threads and crashes with 0."""


def load_matrix(folder: Path, name: str) -> sp.csr_matrix:
    """Read a matrix in the form that libpecos needs: float32, sorted indices."""
    matrix = sp.csr_matrix(sp.load_npz(folder / f"{name}.npz"), dtype=np.float32)
    matrix.sort_indices()
    return matrix


def load_texts(folder: Path, name: str) -> list[str]:
    """Read the texts of the training or test documents."""
    texts: list[str] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return texts


def train(folder: Path, plan: dict[str, Any]) -> None:
    """Cluster the labels by the features of their training documents, train the model and save it."""
    from pecos.xmc import Indexer, LabelEmbeddingFactory

    x, y = load_matrix(folder, "x_train"), load_matrix(folder, "y_train")
    clusters = Indexer.gen(LabelEmbeddingFactory.create(y, x, method="pifa"), seed=plan["seed"])
    if plan["method"] == "xr-linear":
        from pecos.xmc.xlinear.model import XLinearModel

        XLinearModel.train(x, y, C=clusters).save(str(folder / "model"))
        return
    import torch
    from pecos.xmc.xtransformer.model import XTransformer
    from pecos.xmc.xtransformer.module import MLProblemWithText

    torch.manual_seed(plan["seed"])
    params = XTransformer.TrainParams.from_dict({}, recursive=True)
    matcher = params.matcher_params_chain
    matcher.model_shortcut = plan["encoder"]
    matcher.batch_size = plan["batch_size"]
    matcher.batch_gen_workers = WORKERS
    predicting = XTransformer.PredParams.from_dict({}, recursive=True)
    predicting.matcher_params_chain.truncate_length = plan["max_length"]
    problem = MLProblemWithText(load_texts(folder, "train"), y, X_feat=x)
    XTransformer.train(problem, train_params=params, pred_params=predicting).save(str(folder / "model"))


def predict(folder: Path, plan: dict[str, Any]) -> None:
    """Score the test documents with the saved model."""
    x = load_matrix(folder, "x_test")
    depth = {"only_topk": plan["retrieve"], "beam_size": BEAM}
    if plan["method"] == "xr-linear":
        from pecos.xmc.xlinear.model import XLinearModel

        scores = XLinearModel.load(str(folder / "model")).predict(x, **depth)
    else:
        from pecos.xmc.xtransformer.model import XTransformer

        model = XTransformer.load(str(folder / "model"))
        scores = model.predict(load_texts(folder, "test"), X_feat=x, batch_gen_workers=WORKERS, **depth)
    sp.save_npz(folder / "scores.npz", sp.csr_matrix(scores))


if __name__ == "__main__":
    step, folder = sys.argv[1], Path(sys.argv[2])
    {"train": train, "predict": predict}[step](folder, json.loads((folder / "plan.json").read_text(encoding="utf-8")))
