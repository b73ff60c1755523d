"""The registered model, as code that MLflow copies and runs (models-from-code): no pickle on either side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel, PythonModelContext
from pydantic import BaseModel

from ramen.errors import RamenError
from ramen.index.request_batching import RequestBatcher
from ramen.index.retriever import DEFAULT_K, MOST_LABELS, Retriever


class Answer(BaseModel):
    """The labels of one text, best first; served as a JSON object."""

    ids: list[str]
    texts: list[str]
    scores: list[float]


class RetrieverModel(PythonModel):  # type: ignore[misc]
    """`predict(["text", ...], params={"k": 10, "exclude": ["uid"]})` -> one `Answer` per text."""

    def load_context(self, context: PythonModelContext) -> None:
        """Open the files that were logged with the version."""
        index = Path(context.artifacts["index"]).parent
        self.retriever = RequestBatcher(Retriever.load(Path(context.artifacts["encoder"]), index))

    def predict(
        self, context: PythonModelContext, model_input: list[str], params: dict[str, Any] | None = None
    ) -> list[Answer]:
        """Answer each text with its k best labels, without those whose uids are excluded.

        k is `MOST_LABELS` at most, since others wait for the same search.
        """
        k = int((params or {}).get("k", DEFAULT_K))
        if not 1 <= k <= MOST_LABELS:  # an exception of this kind is answered with status 400, any other with 500
            raise MlflowException.invalid_parameter_value(f"params.k is {k}: at least 1 and at most {MOST_LABELS}")
        exclude = [str(uid) for uid in (params or {}).get("exclude", ()) if str(uid)]
        if len(exclude) > MOST_LABELS:
            raise MlflowException.invalid_parameter_value(
                f"params.exclude has {len(exclude)} uids: {MOST_LABELS} at most"
            )
        try:
            answers = self.retriever.query(model_input, k, exclude)
        except RamenError as error:  # the request is at fault
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
