"""The registered model as an MLflow pyfunc.

MLflow copies this file and runs it (models-from-code), so neither logging nor loading uses pickle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel, PythonModelContext
from pydantic import BaseModel

from ramen.errors import RamenError
from ramen.index.request_batching import RequestBatcher
from ramen.index.retriever import DEFAULT_K, MAX_LABELS, Retriever


class Answer(BaseModel):
    """Labels of one text, best first; served as a JSON object."""

    ids: list[str]
    texts: list[str]
    scores: list[float]


class RetrieverModel(PythonModel):  # type: ignore[misc]
    """`predict(["text", ...], params={"k": 10, "exclude": ["uid"]})` -> one `Answer` per text."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the retriever from the files that were logged with the version."""
        index = Path(context.artifacts["index"]).parent
        self.batcher = RequestBatcher(Retriever.load(Path(context.artifacts["encoder"]), index))

    def predict(
        self, context: PythonModelContext, model_input: list[str], params: dict[str, Any] | None = None
    ) -> list[Answer]:
        """Return the k best labels of each text, without those whose uids are excluded.

        k is at most `MAX_LABELS`: requests are batched, so a large k would slow down all of them.
        """
        k = int((params or {}).get("k", DEFAULT_K))
        if not 1 <= k <= MAX_LABELS:  # this exception gives status 400, any other 500
            raise MlflowException.invalid_parameter_value(
                f"params.k = {k}: expected at least 1 and at most {MAX_LABELS}"
            )
        exclude = [str(uid) for uid in (params or {}).get("exclude", ()) if str(uid)]
        if len(exclude) > MAX_LABELS:
            raise MlflowException.invalid_parameter_value(
                f"params.exclude: expected at most {MAX_LABELS} uids, found {len(exclude)}"
            )
        try:
            answers = self.batcher.query(model_input, k, exclude)
        except RamenError as error:  # an invalid text: the client's error
            raise MlflowException.invalid_parameter_value(str(error)) from None
        return [
            Answer(
                ids=[hit.uid for hit in hits],
                texts=[hit.text for hit in hits],
                scores=[hit.score for hit in hits],
            )
            for hits in answers
        ]


mlflow.models.set_model(RetrieverModel())
