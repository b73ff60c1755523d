"""Open a trained or published retriever."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ramen.api.datasets import PathLike
from ramen.artifacts import open_artifact
from ramen.config import EncoderConfig, IndexConfig
from ramen.data.dataset import Texts
from ramen.errors import RamenError, short_repr
from ramen.index import retriever
from ramen.index.retriever import DEFAULT_K, FACTS_FILE, Hit
from ramen.tracking import use_project_store


class Retriever(retriever.Retriever):
    """Encoder, index and labels: `query` returns the best labels of texts, `encode` their vectors."""

    @classmethod
    def from_path(cls, folder: PathLike) -> Retriever:
        """Open the retriever of a run's folder: the published index if there is one, else an exact one.

        Args:
            folder: as given to `train(out=...)`, or an arm of `ramen run`, such as artifacts/ramen.

        Raises:
            ArtifactError: the folder holds no model, or a file is damaged.
        """
        folder = Path(folder)
        if (folder / "retriever" / FACTS_FILE).exists():
            return cls._of(cls.load(folder / "model", folder / "retriever"))
        return exact_retriever(folder)

    @classmethod
    def from_registry(cls, name: str = "ramen", version: str | int = "champion") -> Retriever:
        """Open a version registered in MLflow.

        Args:
            name: registered model.
            version: number or alias.

        Raises:
            RamenError: there is no such version, or the registry cannot be reached.
        """
        from ramen.publishing.registry import load_version

        use_project_store()
        return cls._of(load_version(name, str(version)))

    @classmethod
    def _of(cls, other: retriever.Retriever) -> Retriever:
        return cls(other.encoder, other.index, other.uids, other.texts, other.identity)

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of texts: float32 [n, D], unit norm."""
        return self.encoder.encode(_texts(texts))

    def query(
        self, texts: Sequence[str], k: int = DEFAULT_K, exclude: Sequence[Collection[str]] = ()
    ) -> list[list[Hit]]:
        """Return the k best labels of each text, best first; see `ramen.index.retriever.Retriever.query`."""
        return super().query(_texts(texts), k, exclude)


def _texts(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise RamenError(f"query: expected a list of texts, found the text {short_repr(texts)}; write [text]")
    return list(texts)


def exact_retriever(folder: Path) -> Retriever:
    """Return a run's model with an exact index of its dataset's labels."""
    from ramen.encoder.label_vectors import encode_labels, fuse_label_vectors
    from ramen.encoder.loading import load_trained
    from ramen.index.build import build_index

    model, data = open_artifact(folder / "model", "model"), open_artifact(folder / "dataset", "dataset")
    encoder = load_trained(model.path, EncoderConfig.model_validate(model.manifest["sections"]["encoder"]))
    labels = Texts.read(data.path / "texts" / "labels.parquet")
    vectors = fuse_label_vectors(model.path, encode_labels(encoder, model.path, labels.texts))
    identity = data.counts.get("filtered_pairs", {}).get("identity", "")
    return Retriever(encoder, build_index(vectors, IndexConfig(kind="flat")), labels.uids, labels.texts, identity)
