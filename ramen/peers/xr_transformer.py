"""XR-Transformer of libpecos: the encoder fine-tuned level by level, then linear classifiers on its vectors and TF-IDF.

Initial weights, text length and random seed are those of RAMEN; all other settings are the defaults of libpecos.
"""

from __future__ import annotations

from ramen.encoder.loading import load_encoder
from ramen.peers import Rank, Task, libpecos

BATCH = 32


def fit(task: Task) -> Rank:
    """Fine-tune the configured encoder."""
    encoder = load_encoder(task.encoder.name, task.encoder, "cpu")
    encoder.save(task.work / "encoder")
    return libpecos.fit(
        task,
        "xr-transformer",
        encoder=str(task.work / "encoder"),
        max_length=encoder.settings.max_length,
        batch_size=BATCH,
    )
