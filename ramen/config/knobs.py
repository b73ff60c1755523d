"""Every knob, defined once: default, range, one line of help, source.

A section is a frozen pydantic model. `Config` lists the sections; a section that only one family of base algorithms
reads is nested in `base`.
"""

from __future__ import annotations

import codecs
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from ramen.errors import CONTROL_CHARACTERS, ConfigError, find_lone_surrogate, short_repr, suggest_name

SEED_MAX = 2**32 - 1
"""Largest seed that all random generators in use accept."""
INDEX_MAX = 2**31 - 1
"""Largest count of items: indices are int32."""
EPOCHS_MAX = 100_000
THREADS_MAX = 1024
WEIGHT_MAX = 1000.0
"""Largest weight of a loss term."""
LONGEST_TEXT = 4096
"""Characters of a text knob: the length of the longest path."""

_ASCII = "".join(map(chr, range(32, 127))) + "\t"


def knob(default: Any, help: str, source: str = "rec", *, common: bool = False, **bounds: Any) -> Any:
    """Define a configuration field.

    Args:
        default: its value unless a preset, a parameter file or `--set` gives another.
        help: one line.
        source: tag of the publication or code that the value is from (docs/method.md, Sources); rec is our own.
        common: `ramen config` writes this knob without `--all`.
        bounds: pydantic's ge, gt, le, lt.
    """
    extra: dict[str, Any] = {"source": source, "common": common}
    return Field(default=default, description=help, json_schema_extra=extra, **bounds)


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, numbers coerced (KFP stores integers as floats)."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    required: ClassVar[frozenset[str]] = frozenset()
    """Text knobs that must not be empty. Entries of a list or mapping never may be empty."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_plain_values(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse text that no file, log or registry can hold, and a boolean where a number or text is expected."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if is_section(annotation):
            return value
        items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, str):
                _check_text(item)
                if not item.strip() and (item is not value or info.field_name in cls.required):
                    raise ValueError(f"{short_repr(value)}: expected a name, found empty text")
            elif isinstance(item, bool) and annotation is not bool:
                raise ValueError(f"{short_repr(value)}: expected {_expected(annotation)}, found {str(item).lower()}")
        return value


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    """Return whether a field's type is a (nested) section."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _expected(annotation: Any) -> str:
    return "a whole number" if annotation is int else "a number" if annotation in (float, dict[str, float]) else "text"


def _check_text(text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"expected at most {LONGEST_TEXT} characters, found {len(text):,}")
    if find_lone_surrogate(text):
        raise ValueError(f"{short_repr(text)}: expected UTF-8 text; rename the file or folder if this is its name")
    if CONTROL_CHARACTERS.search(text):
        raise ValueError(f"{short_repr(text)}: expected text without control characters")


class DataConfig(Section):
    """The raw data, and which part of them is used."""

    required = frozenset({"path"})

    source: Literal["debian", "xc"] = knob("debian", "format of the raw data", common=True)
    path: str = knob("data/debian.jsonl.gz", "file (debian) or folder (xc) with the raw data", common=True)
    text: Literal["auto", "title", "title+content"] = knob(
        "auto", "xc: fields that make up a text; auto = title if the folder's name contains 'Titles'", "ngame"
    )
    encoding: str = knob("utf-8", "xc: encoding of raw text files (some released files are latin-1)", "ngame")
    unseen_labels: float = knob(
        0.0,
        "zero-shot: share of the labels hidden in training (from all pairs, edges and steps); only these are ranked at "
        "test time",
        "R-ICLR T12",
        ge=0,
        lt=1,
    )
    filter_self: Literal["auto", "files", "none"] = knob(
        "auto",
        "pairs excluded from training and evaluation: files = those that the source lists; auto = also each document "
        "that is itself a label, and for a test document the labels whose training documents have it as their label; "
        "none = no pair",
        "pyxclib",
    )
    max_documents: int = knob(
        0, "use at most this many documents, sampled by seed; 0 = all", ge=0, le=INDEX_MAX, common=True
    )
    test_fraction: float = knob(0.2, "debian: share of source packages held out for test", gt=0, lt=1)
    seed: int = knob(0, "seed of the split and of the subset", ge=0, le=SEED_MAX)

    @field_validator("encoding")
    @classmethod
    def _check_encoding(cls, value: str) -> str:
        # Lines are split before they are decoded, and fields are found by ASCII characters, so codecs such as hex,
        # punycode, utf-16 and unicode_escape would not work.
        probe = _ASCII + "\\x41\\u0041\\n.xn--mnchen-3ya.a"
        try:
            codecs.lookup(value)
        except (LookupError, ValueError):
            raise ValueError(f"no encoding {value!r}; utf-8 and latin-1 are the usual ones") from None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes that Python does not know
                keeps_ascii = probe.encode("ascii").decode(value) == probe
        except (LookupError, ValueError):
            keeps_ascii = False
        if not keeps_ascii:
            expected = "expected a text encoding that keeps ASCII, such as utf-8 or latin-1"
            raise ValueError(f"{value!r}: {expected}; convert the files to UTF-8")
        return value


class WalkConfig(Section):
    """Cleaning of the raw metadata graphs, and the random walk with restart."""

    hops: int = knob(
        0,
        "hops of the random walk per anchor (a hop is anchor -> row -> anchor); 0 = no walk, original edges only; "
        "published: 400",
        ge=0,
        le=100_000,
    )
    restart: float = knob(0.8, "probability of returning to the start before a hop", "R-ICLR B", gt=0, le=1)
    top_k: int = knob(10, "neighbours kept per anchor, not counting the anchor itself", "pyxclib", ge=1, le=1000)
    volume: float = knob(
        1.0,
        "share of the cleaned edges to keep; subsets are nested: 0.2 is part of 0.5",
        "R-ICLR T7",
        gt=0,
        le=1,
    )
    hub_cap: int = knob(
        300, "remove anchors with more edges than this; 0 = remove none, as published", ge=0, le=INDEX_MAX
    )
    drop_label_anchors: bool = knob(
        False, "strict: remove edges from a document to anchors that are also linked to its labels"
    )


class EncoderConfig(Section):
    """The sentence encoder."""

    required = frozenset({"name"})

    name: str = knob(
        "minilm", "minilm (packaged, offline), tiny (random, for tests), or a Hugging Face name or path", common=True
    )
    max_length: int = knob(
        32,
        "tokens per text, special tokens included; 32 for titles, 128 for full text",
        "R-ICLR T16",
        ge=4,
        le=8192,
        common=True,
    )
    pooling: Literal["auto", "mean", "cls"] = knob("auto", "auto = as the model's own config says, else mean")
    precision: Literal["auto", "bf16", "fp32"] = knob(
        "auto",
        "arithmetic of the forward and backward pass; auto = bf16 where the hardware has it (AMX, AVX512-BF16, CUDA)",
    )
    dropout: float = knob(
        0.0, "dropout of every layer during training; negative = as the model's config says", ge=-1, lt=1
    )
    tokens_per_chunk: int = knob(
        32_768,
        "tokens encoded at a time during training (bounds memory; see training.gradient_caching)",
        ge=64,
        le=2**24,
    )


Sampling = Literal["uniform", "inverse_sqrt_degree"]
"""How one of a row's anchors is sampled."""


def check_known(wanted: Iterable[str], known: Collection[str], knob: str) -> None:
    """Raise ConfigError if a knob names an unknown anchor set."""
    if unknown := sorted(set(wanted) - set(known)):
        names = ", ".join(known) or "none"
        raise ConfigError(f"{knob}: {unknown[0]!r} is no anchor set of the dataset; anchor sets: {names}")


class ObjectiveConfig(Section):
    """Task loss and graph regularisers."""

    graphs: bool = knob(True, "regularise with the metadata graphs; false = the plain base algorithm", common=True)
    anchor_sets: list[str] = knob([], "regularise with these anchor sets only; empty = all", "R-ICLR T10", common=True)
    augment_labels: bool = knob(
        False,
        "ablation AugGT: a document and a label that share an anchor count as a true pair (anchors of at most 500 "
        "edges, 10 new labels per document)",
        "R-ICLR T5",
    )
    margin: float = knob(0.3, "margin of every triplet term", "R-ICLR T16", ge=0, le=2)
    hardest: int = knob(10, "hardest negatives kept per row; 0 = all", "ngame", ge=0, le=1_000_000)
    reduction: Literal["softmax", "mean", "sum_all"] = knob(
        "softmax",
        "how hinges are reduced to a number, in all terms: softmax-weighted over the hardest violators, mean over "
        "unmasked negatives (both averaged over valid rows), or the papers' literal sum",
        "ngame, OAK",
    )
    lambda_document: float = knob(
        0.1, "weight of each document-side regulariser; the task loss has weight 1", "R-ICLR 3", ge=0, le=WEIGHT_MAX
    )
    lambda_label: float = knob(
        0.1, "weight of each label-side regulariser; the task loss has weight 1", "R-ICLR 3", ge=0, le=WEIGHT_MAX
    )
    lambdas: dict[str, float] = knob({}, "weights of single regularisers by name, e.g. {depends.label: 0.3}")
    symmetric: bool = knob(
        True,
        "regularise in both directions: rows rank anchors (as published) and anchors rank rows (as the task does)",
    )
    label_context: Literal["none", "anchors", "documents", "both"] = knob(
        "both",
        "rank labels by their text and the mean vector of their neighbours: anchors of the graphs, training documents, "
        "or both; the share of each set is chosen on held-out documents (0 if it does not help); no cost at query "
        "time; published: none",
    )
    anchor_sampling: Sampling = knob(
        "inverse_sqrt_degree",
        "how a row's positive anchor is sampled, and in which order an oracle reads anchors: uniform as published, or "
        "preferring specific anchors to hubs",
    )
    anchor_reuse: bool = knob(
        True,
        "rows of a step with common neighbours tend to sample the same anchor, so that fewer anchors are encoded; each "
        "row's own probabilities stay as anchor_sampling says",
    )
    anchor_budget: float = knob(
        0.5,
        "at most this many distinct anchors are encoded per step, as a share of its documents and labels; each step "
        "samples which ones, and rows whose anchor is left out are skipped; 0 = no limit",
        ge=0,
        le=1000,
    )
    graph_negatives: float = knob(
        0.5,
        "share of base.random_labels that is sampled from the graphs instead: labels that share an anchor with a "
        "document of the step, hard negatives that need no encoding. 0 = none, as published",
        "PinSage",
        ge=0,
        le=1,
    )
    negative_sets: list[str] = knob([], "sample graph negatives from these anchor sets only; empty = all")

    def check_anchor_sets(self, known: Collection[str]) -> None:
        """Raise ConfigError if a knob names an unknown anchor set or regulariser."""
        check_known(self.anchor_sets, known, "objective.anchor_sets")
        check_known(self.negative_sets, known, "objective.negative_sets")
        regularisers = [f"{name}.{side}" for name in self.anchor_sets or known for side in ("document", "label")]
        for name in self.lambdas:
            if name not in regularisers:
                unselected = " in objective.anchor_sets" if name.rpartition(".")[0] in known else ""
                hint = suggest_name(name, regularisers)
                raise ConfigError(f"objective.lambdas.{name}: no such regulariser{unselected}; {hint}")

    @model_validator(mode="after")
    def _check_weights(self) -> ObjectiveConfig:
        for name, weight in self.lambdas.items():
            if weight < 0:
                raise ValueError(f"lambdas.{name} = {weight}: a regularisation weight is at least 0")
            if weight > WEIGHT_MAX:
                raise ValueError(f"lambdas.{name} = {weight}: a regularisation weight is at most {WEIGHT_MAX:g}")
        return self

    def weight(self, anchor_set: str, side: Literal["document", "label"]) -> float:
        """Return the initial weight of one regulariser; 0 when graphs are off."""
        if not self.graphs or (self.anchor_sets and anchor_set not in self.anchor_sets):
            return 0.0
        default = self.lambda_document if side == "document" else self.lambda_label
        return float(self.lambdas.get(f"{anchor_set}.{side}", default))


class BanditConfig(Section):
    """Online tuning of the regularisation weights."""

    enabled: bool = knob(False, "tune the weights during training; false = they stay as objective sets them")
    form: Literal["safe", "printed"] = knob(
        "safe",
        "safe = perturbations of one size, feedback relative to its running mean and deviation, bounded weights; "
        "printed = P / z of Gaussian z without bounds, as in the paper (diverges)",
        "R-ICLR 3, xcai",
    )
    feedback: Literal["heldout_loss", "accuracy", "task_loss", "weighted_objective"] = knob(
        "heldout_loss",
        "measure of a window: likelihood of held-out documents' labels, in-batch accuracy, task loss, or the "
        "whole weighted loss as published (which shrinks every weight, since each multiplies a positive loss)",
        "R-ICLR 3, xcai",
    )
    period: int = knob(30, "steps per window", "R-ICLR 3", ge=1, le=1_000_000)
    sigma: float = knob(0.1, "standard deviation of the perturbation (variance 0.01)", "R-ICLR 3", gt=0, le=100)
    lr: float = knob(0.01, "learning rate of the weights", "R-ICLR 3", gt=0, le=100)


class MiningConfig(Section):
    """Mined hard negatives of ance and dexml."""

    negatives: int = knob(
        1, "mined negatives per document and step, shared by all documents of the step", "DEXML", ge=0, le=1000
    )


class ClustersConfig(Section):
    """Clusters of similar documents of ngame and dexa."""

    size: int = knob(4, "documents per cluster at first", "DEXA", ge=1, le=1_000_000)
    double_every: int = knob(2, "epochs after which the size doubles", ge=1, le=EPOCHS_MAX)


class DexaConfig(Section):
    """Label offsets of dexa."""

    labels_per_offset: int = knob(3, "labels that share an offset, on average", "xcai", ge=1, le=1_000_000)


class DexmlConfig(Section):
    """Loss of dexml."""

    temperature: float = knob(0.05, "temperature of the decoupled softmax", "DEXML", ge=1e-4, le=100)


class BaseConfig(Section):
    """The base algorithm that RAMEN regularises."""

    name: str = knob("inbatch", "inbatch, ance, ngame, dexa, dexml or siamesexml", common=True)
    refresh_from: int = knob(2, "epoch before which the base first clusters or mines", ge=0, le=EPOCHS_MAX)
    refresh_every: int = knob(2, "epochs between clusterings or minings", ge=1, le=EPOCHS_MAX)
    random_labels: float = knob(
        1.0,
        "labels sampled uniformly into each step, as a share of its rows: negatives of the task loss, and regularised "
        "where there are graphs, so that rare labels are trained too (with graphs, objective.graph_negatives replaces "
        "some of them). 0 = none, as published",
        ge=0,
        le=1000,
    )
    mining: MiningConfig = MiningConfig()
    clusters: ClustersConfig = ClustersConfig()
    dexa: DexaConfig = DexaConfig()
    dexml: DexmlConfig = DexmlConfig()


class TrainingConfig(Section):
    """Optimisation, shared by warm-up and the prune-and-retrain rounds."""

    batch_size: int = knob(256, "documents per step, over all processes", ge=2, le=2**20, common=True)
    epochs: int | Literal["auto"] = knob(
        "auto",
        "epochs of warm-up and retraining together, with a linear decay of the learning rate; auto = train at a "
        "constant rate until the averaged weights stop improving on held-out documents, and keep the average",
        common=True,
    )
    max_epochs: int = knob(40, "epochs=auto: maximum number of epochs", ge=2, le=EPOCHS_MAX)
    max_minutes: float = knob(
        0.0,
        "epochs=auto: time limit of warm-up and retraining together, in minutes; 0 = no limit",
        ge=0,
        le=1e7,
        common=True,
    )
    warmup_epochs: int = knob(
        4, "epochs on the unpruned graphs; with epochs=auto at least 48 steps", ge=1, le=EPOCHS_MAX
    )
    lr: float = knob(1e-4, "peak learning rate", gt=0, le=1, common=True)
    lr_warmup_steps: int = knob(
        50,
        "steps in which the learning rate rises; with a given number of epochs at most half of all steps",
        ge=0,
        le=INDEX_MAX,
    )
    weight_decay: float = knob(0.01, "AdamW decay; none on biases and layer norms", "ngame", ge=0, le=100)
    validation_fraction: float = knob(
        0.05,
        "share of training documents held out to decide when training ends, to choose the label context and the "
        "classifiers' share, to detect when pruning has converged, and for the bandit's heldout_loss; whole groups, if "
        "the dataset has them. With epochs=auto at least 500 documents, or a tenth of fewer than 5,000",
        ge=0,
        lt=0.5,
    )
    checkpoint_minutes: float = knob(10.0, "minutes between checkpoints", gt=0, le=1e6)
    gradient_caching: bool = knob(
        False,
        "compute vectors twice and keep the activations of one chunk (encoder.tokens_per_chunk) only: batches "
        "of any size in bounded memory, for about a third more time",
        "GradCache",
    )
    processes: int = knob(
        0,
        "processes that train together on this machine; 0 = one per GPU, or 1 without a GPU",
        ge=0,
        le=THREADS_MAX,
    )
    threads: int = knob(
        0, "torch threads of each process; 0 = all cores, divided among the processes", ge=0, le=THREADS_MAX
    )
    seed: int = knob(0, "seed of initialisation, order, sampling and dropout", ge=0, le=SEED_MAX)

    @field_validator("epochs", mode="before")
    @classmethod
    def _check_epochs(cls, value: Any) -> Any:
        number = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= EPOCHS_MAX
        if value != "auto" and not (number and value == int(value)):
            raise ValueError(f"{short_repr(value)}: expected a whole number from 1 to {EPOCHS_MAX}, or auto")
        return value if value == "auto" else int(value)

    @model_validator(mode="after")
    def _check_limits(self) -> TrainingConfig:
        if self.epochs != "auto" and self.max_minutes:
            raise ValueError(f"max_minutes = {self.max_minutes:g} needs epochs = auto, not {self.epochs}")
        if self.epochs != "auto" and self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs = {self.warmup_epochs} exceeds epochs = {self.epochs}; set both")
        return self


Distance = Literal["l2", "mse"]
"""Distance between the encoder's vectors and an oracle's."""


class GuidanceConfig(Section):
    """Guidance of the encoder by an oracle that reads metadata as text (MOGIC)."""

    enabled: bool = knob(
        False,
        "train an oracle before the warm-up: the same base algorithm without graphs, on texts followed by the texts of "
        "their anchors. Its vectors guide the encoder; the oracle is not served",
        common=True,
    )
    anchor_sets: list[str] = knob([], "the oracle reads these anchor sets only; empty = all")
    max_length: int = knob(64, "tokens that the oracle reads of a text and its anchors; published: 128", ge=8, le=8192)
    epochs: int = knob(8, "epochs of the oracle; published: 300", ge=1, le=EPOCHS_MAX)
    align_documents: float = knob(
        1.0, "weight: the oracle's documents rank the encoder's labels", "M-blog", ge=0, le=WEIGHT_MAX
    )
    align_labels: float = knob(
        1.0, "weight: the encoder's documents rank the oracle's labels", "M-blog", ge=0, le=WEIGHT_MAX
    )
    match_documents: float = knob(
        0.1, "weight: distance of the encoder's documents to the oracle's", "M-blog", ge=0, le=WEIGHT_MAX
    )
    match_labels: float = knob(
        0.1, "weight: distance of the encoder's labels to the oracle's", "M-blog", ge=0, le=WEIGHT_MAX
    )
    distance: Distance = knob(
        "l2", "l2 = mean norm of the difference; mse = mean of its squared elements, as released", "MOGIC, xcai"
    )


class PruningConfig(Section):
    """Prune-and-retrain rounds."""

    every: int = knob(4, "epochs between prunings; with training.epochs=auto at least 48 steps", ge=1, le=EPOCHS_MAX)
    rule: Literal["quantile", "threshold", "none"] = knob(
        "quantile",
        "what the cosine of an edge must exceed: a quantile of random pairs of the same graph, which is independent of "
        "the encoder's scale, or a fixed threshold as published; none = retrain on the unpruned graphs",
        "rec; R-ICLR B",
    )
    quantile: float = knob(
        0.75, "rule quantile: share of random pairs whose cosine an edge must exceed to stay", ge=0, lt=1
    )
    threshold: float = knob(0.0, "rule threshold: cosine that an edge must exceed to stay", "R-ICLR B", ge=-1, le=1)
    patience: int = knob(
        3, "stop pruning after this many rounds without a better validation P@1; 0 = never stop", ge=0, le=EPOCHS_MAX
    )


class ClassifierConfig(Section):
    """The second stage of NGAME-type bases: a classifier per label on the frozen encoder."""

    epochs: int = knob(30, "epochs over the documents' frozen vectors; 0 = train no classifiers", ge=0, le=EPOCHS_MAX)
    positives: int = knob(2, "positives per document and step, sampled with replacement", "R-ICLR T16", ge=1, le=1000)
    negatives: int = knob(
        12, "negatives per document and step, sampled from its 100 nearest labels", "R-ICLR T16", ge=1, le=10_000
    )


class ScoringConfig(Section):
    """Retrieval and metrics on the test documents."""

    propensity_a: float = knob(0.55, "propensity A; Wikipedia-500K 0.5, Amazon 0.6", "pyxclib", gt=0, le=100)
    propensity_b: float = knob(1.5, "propensity B; Wikipedia-500K 0.4, Amazon 2.6", "pyxclib", gt=0, le=1000)
    links: bool = knob(
        False, "also rank each set's anchors for the training documents: R@100 of their raw links", "R-ICLR T6"
    )
    peers: list[Literal["tfidf", "untrained"]] = knob(
        ["tfidf", "untrained"],
        "also evaluate these peers on the same test documents: TF-IDF, and the encoder before training; takes seconds, "
        "or minutes at a million labels. [] = none",
    )
    base: str = knob("", "evaluation artifact of another run, compared with this one in metrics and report")


FACTORY_MAX = 2**20
"""Largest number in a faiss factory string, such as the inverted lists of IVF1048576."""
INDEX_KINDS = ("auto", "flat", "hnsw", "ivf")


class IndexConfig(Section):
    """The published retriever."""

    kind: str = knob(
        "auto",
        "flat (exact scan), hnsw (small-world graph), ivf (inverted lists, compressed until they fit memory_gb), a "
        "faiss factory string such as IVF4096,PQ48, or auto: flat up to 10,000 labels, hnsw if it fits, else ivf",
    )
    memory_gb: float = knob(16.0, "auto, ivf: largest size of the index in the server's memory", gt=0, le=1e6)
    ef_search: int = knob(128, "candidates per search of the HNSW graph", "ngame", ge=8, le=100_000)
    nprobe: int = knob(
        0,
        "inverted lists searched per query; 0 = the smallest power of two that reaches min_recall",
        ge=0,
        le=2**20,
    )
    min_recall: float = knob(
        0.9, "gate: the alias moves only if ANN recall of the exact top 10 is at least this", ge=0, le=1
    )
    max_query_ms: float = knob(
        0.0,
        "gate: the alias moves only if the median time of a single query is at most this; 0 = no limit",
        ge=0,
        le=1e9,
    )
    gate: dict[str, float] = knob(
        {"psp_at_5": 0.0},
        "gate: metric, such as p_at_1 or tail/psp_at_5 -> points it may lose against the version that has the "
        "alias, both on this dataset's test documents; {} = no comparison",
    )
    model: str = knob(
        "ramen",
        "registered model name in MLflow; empty = write the retriever without registering it (required when tracking "
        "is off)",
        common=True,
    )
    alias: str = knob("champion", "alias that moves to the published version; empty = none")

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, value: str) -> str:
        if value in INDEX_KINDS:
            return value
        if not re.fullmatch(r"[A-Z][A-Za-z0-9_,()]{0,199}", value):
            raise ValueError(f"expected {', '.join(INDEX_KINDS)}, or a faiss factory string such as IVF4096,PQ48")
        for token, number in re.findall(r"(IMI2x|[A-Za-z_]+)(\d+)", value):
            # faiss accepts any number, but 0 ends the process and codes of 24 bits take 50 GB
            largest = {"IMI2x": 10, "x": 16, "HNSW": 256}.get(token.lstrip("_"), FACTORY_MAX)
            if not 1 <= int(number[:10]) <= largest:
                raise ValueError(f"{value!r}: expected a number from 1 to {largest} in {token}{number}")
        return value

    @field_validator("alias")
    @classmethod
    def _check_alias(cls, value: str) -> str:
        # MLflow reserves latest and v1, and reads a number as the version of that number
        if value and (
            not re.fullmatch(r"[A-Za-z_][\w-]{0,99}", value, re.A) or re.fullmatch(r"(?i)latest|v\d+", value)
        ):
            raise ValueError(f"{value!r}: expected a name of letters, digits, - and _, not latest, a number or v1")
        return value

    @field_validator("model")
    @classmethod
    def _check_model(cls, value: str) -> str:
        if re.search(r"[/:@%?#\\]", value) or value != value.strip() or len(value) > 200:
            raise ValueError(f"{short_repr(value)}: expected a name without / : @ % ? #, or nothing")
        return value

    @field_validator("gate")
    @classmethod
    def _check_gate(cls, value: dict[str, float]) -> dict[str, float]:
        for metric in value:
            if not re.fullmatch(r"([\w-]+/)*[\w-]+_at_\d+", metric):
                raise ValueError(f"{short_repr(metric)} is not a metric; expected one such as psp_at_5 or tail/p_at_1")
            if abs(value[metric]) > 100:
                raise ValueError(f"{metric} = {value[metric]:g}: expected points of at most 100")
        return value


class Config(BaseModel):
    """All sections."""

    model_config = Section.model_config

    data: DataConfig = DataConfig()
    walk: WalkConfig = WalkConfig()
    encoder: EncoderConfig = EncoderConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    bandit: BanditConfig = BanditConfig()
    base: BaseConfig = BaseConfig()
    training: TrainingConfig = TrainingConfig()
    guidance: GuidanceConfig = GuidanceConfig()
    pruning: PruningConfig = PruningConfig()
    classifier: ClassifierConfig = ClassifierConfig()
    scoring: ScoringConfig = ScoringConfig()
    index: IndexConfig = IndexConfig()

    def sections(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return complete sections as plain dicts, in the order of `SECTIONS`."""
        wanted = set(SECTIONS if names is None else names)
        return {name: getattr(self, name).model_dump() for name in SECTIONS if name in wanted}


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation for name, field in Config.model_fields.items() if is_section(field.annotation)
}
"""Section name -> class, as the fields of `Config` state them."""


def knobs(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield path and field of each knob of a section: `name`, or `dexa.labels_per_offset` in a nested section."""
    for key, field in section.model_fields.items():
        if is_section(field.annotation):
            for path, inner in knobs(field.annotation):
                yield f"{key}.{path}", inner
        else:
            yield key, field


def describe_range(field: FieldInfo) -> str:
    """Return the choices or bounds of a field as text."""
    annotation: Any = field.annotation
    if annotation == int | Literal["auto"]:
        return f">= 1, <= {EPOCHS_MAX} | auto"
    choices = getattr(annotation, "__args__", None)
    if choices and getattr(annotation, "__origin__", None) is Literal:
        return " | ".join(map(str, choices))
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = []
    for meta in field.metadata:
        for attribute, sign in signs.items():
            if getattr(meta, attribute, None) is not None:
                bounds.append(f"{sign} {getattr(meta, attribute)}")
    return ", ".join(bounds)


def extra(field: FieldInfo, key: str) -> Any:
    """Return what `knob` stored with a field: its `source`, or whether it is `common`."""
    stored = field.json_schema_extra
    return stored[key] if isinstance(stored, Mapping) else None
