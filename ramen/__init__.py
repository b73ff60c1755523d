"""Graph-regularised encoder training for extreme classification.

The library in five calls (docs/library.md):

    dataset = ramen.load_dataset(frame, graphs=...)
    run = ramen.train(dataset, training={"epochs": 8})
    run.model.query(["command line mail client"], k=5)
    ramen.evaluate(scores_of_another_method, dataset)
    ramen.Retriever.from_registry("ramen").query(["command line mail client"])

Everything is imported when it is first used, so `import ramen` loads neither torch nor pandas.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramen.api.datasets import load_dataset
    from ramen.api.evaluation import evaluate
    from ramen.api.graphs import build_graph
    from ramen.api.retrieval import Retriever
    from ramen.api.runs import Run, train
    from ramen.data.dataset import Dataset
    from ramen.errors import RamenError
    from ramen.index.retriever import Hit

__version__ = "0.1.0"

# OpenMP's threads spin while they wait for each other. Next to any other process on the same cores they spin away the
# time that the one they wait for needs: embedding takes seven times as long (docs/training.md). It is read when torch
# loads its OpenMP, so it must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_MODULES = {
    "Dataset": "ramen.data.dataset",
    "Hit": "ramen.index.retriever",
    "RamenError": "ramen.errors",
    "Retriever": "ramen.api.retrieval",
    "Run": "ramen.api.runs",
    "build_graph": "ramen.api.graphs",
    "evaluate": "ramen.api.evaluation",
    "load_dataset": "ramen.api.datasets",
    "train": "ramen.api.runs",
}
"""Public name -> its module."""

__all__ = [
    "Dataset",
    "Hit",
    "RamenError",
    "Retriever",
    "Run",
    "__version__",
    "build_graph",
    "evaluate",
    "load_dataset",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'ramen' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
