"""The model card: README.md of a saved encoder, with the metadata that the Hugging Face Hub reads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ramen import __version__
from ramen.config import SECTIONS
from ramen.encoder.model import SETTINGS_FILE
from ramen.files import read_json, write_text

CARD_FILE = "README.md"
TEMPLATE = Path(__file__).with_suffix(".md.jinja")
TAGS = ("sentence-transformers", "sentence-similarity", "feature-extraction", "extreme-classification", "ramen")
HUB_NAMES = {"minilm": "sentence-transformers/all-MiniLM-L6-v2"}
"""Packaged encoder -> its name on the Hub."""
TEST_METRICS = {
    "p_at_1": "Precision@1",
    "p_at_5": "Precision@5",
    "n_at_5": "nDCG@5",
    "psp_at_1": "Propensity-scored Precision@1",
    "psp_at_5": "Propensity-scored Precision@5",
    "r_at_10": "Recall@10",
    "r_at_100": "Recall@100",
}
"""Metrics of an evaluation that the card lists, with their names there."""

PAPERS = {
    "ramen": ("Mittal", "Graph Regularized Encoder Training for Extreme Classification",
              "Companion Proceedings of the ACM Web Conference", 2025),
    "ance": ("Xiong", "Approximate Nearest Neighbor Negative Contrastive Learning for Dense Text Retrieval",
             "ICLR", 2021),
    "ngame": ("Dahiya", "NGAME: Negative Mining-aware Mini-batching for Extreme Classification", "WSDM", 2023),
    "dexa": ("Dahiya", "Deep Encoders with Auxiliary Parameters for Extreme Classification", "KDD", 2023),
    "dexml": ("Gupta", "Dual-Encoders for Extreme Multi-Label Classification", "ICLR", 2024),
    "siamesexml": ("Dahiya", "SiameseXML: Siamese Networks meet Extreme Classifiers with 100M Labels", "ICML", 2021),
    "mogic": ("Prabhu", "MOGIC: Metadata-infused Oracle Guidance for Improved Extreme Classification", "ICML", 2025),
}  # fmt: skip
"""First author, title, venue, year; by base algorithm, and of RAMEN and of MOGIC's oracle."""


def write_model_card(
    folder: Path,
    *,
    sections: Mapping[str, Mapping[str, Any]],
    dataset: Mapping[str, Any],
    counts: Mapping[str, Any],
    heldout_p_at_1: float | None = None,
    test_metrics: Mapping[str, float] | None = None,
) -> None:
    """Write README.md into the folder of a saved encoder. The same arguments give the same bytes.

    Args:
        folder: written by `SentenceEncoder.save`.
        sections: section name -> values that the model was trained with.
        dataset: manifest of the dataset; the card lists its sizes if its `counts` hold them.
        counts: `epochs`, `steps` and `documents` of the training.
        heldout_p_at_1: on held-out training documents, in percent.
        test_metrics: of an evaluation, in percent; listed in place of the held-out figure.
    """
    from jinja2 import Environment, StrictUndefined

    name = str(dataset["sections"].get("data", {}).get("path", ""))
    data_name = re.sub(r"(\.jsonl?)?(\.gz|\.xz)?$", "", Path(name).name) or "A dataset in memory"
    metrics, measured_on = _metrics(test_metrics, heldout_p_at_1)
    base, encoder = str(sections["base"]["name"]), str(sections["encoder"]["name"])
    hub_name = HUB_NAMES.get(encoder, encoder if re.fullmatch(r"[\w.-]+/[\w.-]+", encoder) else None)
    if hub_name == encoder and Path(encoder).exists():
        hub_name = None
    title = f"RAMEN encoder trained on {data_name if name else 'a dataset in memory'}"
    metadata: dict[str, Any] = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": list(TAGS),
    }
    if hub_name:
        metadata |= {"base_model": hub_name, "base_model_relation": "finetune"}
    if metrics:
        metadata["model-index"] = [{"name": title, "results": [_result(data_name, measured_on, metrics)]}]
    pooling = read_json(folder / "1_Pooling" / "config.json", dict[str, Any])
    papers = ["ramen", *([base] if base in PAPERS else [])]
    papers += ["mogic"] if sections.get("guidance", {}).get("enabled") else []
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    text = template.render(
        metadata=_yaml(metadata),
        title=title,
        base_model=f"[{hub_name}](https://huggingface.co/{hub_name})" if hub_name else _described(encoder),
        max_length=read_json(folder / SETTINGS_FILE, dict[str, Any])["max_seq_length"],
        dimension=pooling["word_embedding_dimension"],
        pooling="CLS" if pooling["pooling_mode_cls_token"] else "mean",
        data_name=data_name,
        data=dataset["counts"] if {"documents", "labels", "pairs", "anchor_sets"} <= set(dataset["counts"]) else None,
        metrics=metrics,
        measured_on=measured_on,
        base=base,
        counts=counts,
        version=__version__,
        settings=_changed_settings(sections),
        citations="\n\n".join(bibtex(paper) for paper in papers),
    )
    write_text(folder / CARD_FILE, text)


def _metrics(test: Mapping[str, float] | None, heldout: float | None) -> tuple[dict[str, float], str]:
    """Return the metrics by name, in percent, and the documents on which they were measured."""
    if test is not None:
        # of a model with label context, the saved encoder is what was measured without it
        found = {name: test.get(f"encoder/{key}", test.get(key, math.nan)) for key, name in TEST_METRICS.items()}
        return {name: value for name, value in found.items() if math.isfinite(value)}, "the test documents"
    return ({} if heldout is None else {"Precision@1": heldout}), "held-out training documents"


def _result(data_name: str, measured_on: str, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return one entry of the metadata's `model-index`; values are in percent."""
    return {
        "task": {"type": "information-retrieval", "name": "Information Retrieval"},
        "dataset": {"type": re.sub(r"[^\w.-]+", "-", data_name).lower(), "name": f"{data_name}, {measured_on}"},
        "metrics": [
            {"type": re.sub(r"[ -]", "_", name).lower(), "value": round(value, 4), "name": f"{name} (%)"}
            for name, value in metrics.items()
        ],
    }


def _described(encoder: str) -> str:
    """Return what the base model is, without the path of a local folder."""
    return "a small random BERT (for tests)" if encoder == "tiny" else f"a local folder, {Path(encoder).name}"


def _changed_settings(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the knobs that differ from the defaults, as YAML; the encoder's name may be a private path."""
    changed: dict[str, dict[str, Any]] = {}
    for name, values in sections.items():
        defaults = SECTIONS[name]().model_dump()
        differing = {key: value for key, value in values.items() if value != defaults.get(key)}
        if name == "encoder":
            differing.pop("name", None)
        if differing:
            changed[name] = differing
    return _yaml(changed) if changed else ""


def _yaml(values: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=1000))


def bibtex(paper: str) -> str:
    """Return the BibTeX entry of a key of `PAPERS`."""
    author, title, venue, year = PAPERS[paper]
    fields = {"author": f"{author} and others", "title": title, "booktitle": venue, "year": year}
    lines = [f"  {name:9} = {{{value}}}" for name, value in fields.items()]
    return f"@inproceedings{{{paper}{year},\n" + ",\n".join(lines) + "\n}"
