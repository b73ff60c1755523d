"""Every knob, once: default, range, one line of help, source.

A section is a frozen pydantic model; a stage is handed the sections it declares and no others. Values are
resolved once, at the front:

    class defaults  <  preset (`--preset P`)  <  parameter file (params.yaml, or `--params F`)  <  `--set a.b=c`

The repository's params.yaml is a complete, commented file (written by `ramen config`), so naming a preset on
the command line sets that file aside unless `--params` asks for it too.

Values are read as YAML 1.2: `yes` and 2024-02-30 are text, 010 is ten. Tags, repeated keys, files of more than 256 KiB
and values nested deeper than 20 are refused.

Source tags are explained in docs/method.md, Sources; rec is ours.
"""

from __future__ import annotations

import codecs
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ramen.errors import CONTROL, ConfigError, lone_surrogate, nearest, shown
from ramen.yamlfile import dump_yaml, parse_yaml, read_yaml

SEED_MAX = 2**32 - 1
"""Largest seed that all random generators in use accept."""
INDEX_MAX = 2**31 - 1
"""Largest count of items: indices are int32."""
EPOCHS_MAX = 100_000
THREADS_MAX = 1024
WEIGHT_MAX = 1000.0
"""Largest weight of a loss term."""
LONGEST_TEXT = 4096
"""Characters of a text knob: as long as a path can be."""

PRESETS = Path(__file__).parent / "presets"
PARAMS_FILE = "params.yaml"
EXTENDS = "extends"
"""Key of a preset that names another, whose values it starts from."""


def knob(default: Any, help: str, source: str = "rec", **bounds: Any) -> Any:
    """A configuration field: `bounds` are pydantic's (ge, gt, le, lt)."""
    return Field(default=default, description=help, json_schema_extra={"source": source}, **bounds)


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, numbers coerced (KFP stores integers as floats)."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
    required: ClassVar[frozenset[str]] = frozenset()
    """Text knobs that may not be empty; entries of a list or mapping never may."""

    @field_validator("*", mode="before")
    @classmethod
    def _plain_values(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse text that no file, log or registry could hold, and true or false where a number is expected."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, str):
                _check_text(item)
                if not item.strip() and (item is not value or info.field_name in cls.required):
                    raise ValueError(f"{shown(value)}: expected a name, found empty text")
            elif isinstance(item, bool) and annotation is not bool:
                raise ValueError(f"{shown(value)}: expected {_expected(annotation)}, found {str(item).lower()}")
        return value


def _expected(annotation: Any) -> str:
    return "a whole number" if annotation is int else "a number" if annotation in (float, dict[str, float]) else "text"


def _check_text(text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"expected at most {LONGEST_TEXT} characters, found {len(text):,}")
    if lone_surrogate(text):
        raise ValueError(f"{shown(text)}: expected UTF-8 text; rename the file or folder if this is its name")
    if CONTROL.search(text):
        raise ValueError(f"{shown(text)}: expected text without control characters")


_ASCII = "".join(map(chr, range(32, 127))) + "\t"


class DataConfig(Section):
    """Where the data come from and what is kept of them."""

    required = frozenset({"path"})

    source: Literal["debian", "xc"] = knob("debian", "source module that reads the data")
    path: str = knob("data/debian.jsonl.gz", "file (debian) or folder (xc) the source reads")
    text: Literal["auto", "title", "title+content"] = knob(
        "auto", "xc: fields that make a text; auto = title if the folder's name contains 'Titles'", "ngame"
    )
    encoding: str = knob("utf-8", "xc: encoding of raw text files (released files are sometimes latin-1)", "ngame")
    unseen_labels: float = knob(
        0.0,
        "zero-shot: share of the labels hidden in training (in no pair, edge or step), the only candidates at test",
        "R-ICLR T12",
        ge=0,
        lt=1,
    )
    filter_self: Literal["auto", "files", "none"] = knob(
        "auto",
        "pairs that do not count: auto = those that the source names, each document that is a label too for itself, "
        "and for a test document the labels whose training documents have it as their label; files = those that the "
        "source names; none = no pair",
        "pyxclib",
    )
    max_documents: int = knob(0, "keep at most this many documents, chosen by seed; 0 = all", ge=0, le=INDEX_MAX)
    test_fraction: float = knob(0.2, "debian: share of source packages held out for test", gt=0, lt=1)
    seed: int = knob(0, "seed of the split and of the subset", ge=0, le=SEED_MAX)

    @field_validator("encoding")
    @classmethod
    def _encoding_is_of_text(cls, value: str) -> str:
        # lines are split before they are decoded, and fields are found by ASCII characters: hex, punycode, utf-16 and
        # unicode_escape are codecs too
        probe = _ASCII + "\\x41\\u0041\\n.xn--mnchen-3ya.a"
        try:
            codecs.lookup(value)
        except (LookupError, ValueError):
            raise ValueError(f"no encoding {value!r}; utf-8 and latin-1 are the usual ones") from None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of an escape that Python does not know
                keeps = probe.encode("ascii").decode(value) == probe
        except (LookupError, ValueError):
            keeps = False
        if not keeps:
            expected = "expected a text encoding that keeps ASCII, such as utf-8 or latin-1"
            raise ValueError(f"{value!r}: {expected}; convert the files to UTF-8")
        return value


class WalkConfig(Section):
    """Cleaning of the raw metadata graphs and the random walk with restart."""

    hops: int = knob(
        0,
        "hops per anchor (a hop is anchor -> row -> anchor); 0 = no walk, the edges as they are; published: 400",
        ge=0,
        le=100_000,
    )
    restart: float = knob(0.8, "probability of jumping back to the start before a hop", "R-ICLR B", gt=0, le=1)
    top_k: int = knob(10, "neighbours kept per anchor, without the anchor itself", "pyxclib", ge=1, le=1000)
    max_new: int = knob(10, "new anchors added to a row at most; original edges always stay", ge=0, le=1000)
    degree_cap: int = knob(
        500, "rows and anchors of a higher degree are left out of the walk", "pyxclib", ge=1, le=INDEX_MAX
    )
    volume: float = knob(1.0, "share of the clean edges kept, nested: 0.2 is part of 0.5", "R-ICLR T7", gt=0, le=1)
    hub_cap: int = knob(
        300, "anchors with more edges than this are removed altogether; 0 = none, as published", ge=0, le=INDEX_MAX
    )
    drop_label_anchors: bool = knob(False, "strict: drop document edges to anchors that are its own labels")
    threads: int = knob(
        0, "threads of the walk; 0 = all cores (the result does not depend on it)", ge=0, le=THREADS_MAX
    )
    seed: int = knob(0, "seed of the walk", ge=0, le=SEED_MAX)


class EncoderConfig(Section):
    """The sentence encoder."""

    required = frozenset({"name"})

    name: str = knob("minilm", "minilm (packaged, offline), tiny (random, for tests), or a Hugging Face name or path")
    max_length: int = knob(
        32, "tokens per text, special tokens included; 32 for titles, 128 full text", "R-ICLR T16", ge=4, le=8192
    )
    pooling: Literal["auto", "mean", "cls"] = knob("auto", "auto = what the model's own config says, else mean")
    precision: Literal["auto", "bf16", "fp32"] = knob(
        "auto",
        "arithmetic of the forward and backward pass; auto = bf16 where the hardware has it (AMX, AVX512-BF16, CUDA)",
    )
    dropout: float = knob(
        0.0, "dropout of every layer while training; negative = what the model's config says", ge=-1, lt=1
    )
    tokens_per_chunk: int = knob(
        32_768,
        "tokens encoded at a time while training (bounds memory; see training.gradient_caching)",
        ge=64,
        le=2**24,
    )


def check_known(wanted: Iterable[str], known: Collection[str], knob: str) -> None:
    """Raise ConfigError if a knob names an anchor set that is not among the known ones."""
    if unknown := sorted(set(wanted) - set(known)):
        there = ", ".join(known) or "none"
        raise ConfigError(f"{knob}: {unknown[0]!r} is no anchor set of the dataset; there are {there}")


Sampling = Literal["uniform", "inverse_sqrt_degree"]
"""How an anchor is drawn among those of a row."""


class ObjectiveConfig(Section):
    """Task loss and graph regularisers."""

    graphs: bool = knob(True, "regularise with the metadata graphs; false = the plain base algorithm")
    anchor_sets: list[str] = knob([], "regularise with these anchor sets only; empty = all", "R-ICLR T10")
    augment_labels: bool = knob(
        False,
        "ablation AugGT: a document and a label that share an anchor count as a true pair (anchors of at most 500 "
        "edges, 10 new labels per document)",
        "R-ICLR T5",
    )
    margin: float = knob(0.3, "margin of every triplet term", "R-ICLR T16", ge=0, le=2)
    hardest: int = knob(10, "hardest negatives kept per row; 0 = all", "ngame", ge=0, le=1_000_000)
    temperature: float = knob(
        0.1, "softmax temperature of the negatives' weights, and of the bandit's heldout_loss", "ngame", ge=1e-4, le=100
    )
    reduction: Literal["softmax", "mean", "sum_all"] = knob(
        "softmax",
        "how hinges become a number, the same for all terms: softmax-weighted over the hardest violators, "
        "mean over unmasked negatives (both averaged over valid rows), or the papers' literal sum",
        "ngame, OAK",
    )
    lambda_task: float = knob(1.0, "weight of the task loss", "R-ICLR 3", ge=0, le=WEIGHT_MAX)
    lambda_document: float = knob(0.1, "weight of each document-side regulariser", "R-ICLR 3", ge=0, le=WEIGHT_MAX)
    lambda_label: float = knob(0.1, "weight of each label-side regulariser", "R-ICLR 3", ge=0, le=WEIGHT_MAX)
    lambdas: dict[str, float] = knob({}, "weight of single regularisers by name, e.g. {depends.label: 0.3}")
    symmetric: bool = knob(
        True,
        "regularise in both directions: rows rank anchors (as published) and anchors rank rows (as the task does)",
    )
    label_context: Literal["none", "anchors", "documents", "both"] = knob(
        "both",
        "rank labels by their text and the mean of their neighbours, each set with the share that held-out documents "
        "ask for (0 if it does not help); free at query time. anchors of the graphs, training documents, both; "
        "published: none",
    )
    anchor_pool: Literal["union", "separate"] = knob(
        "union", "negatives of a regulariser: the anchors chosen by both sides, or by its own side", "R-ICLR"
    )
    anchor_sampling: Sampling = knob(
        "inverse_sqrt_degree",
        "how a row's positive anchor is drawn, and in which order an oracle reads them; uniform as published, the "
        "other favours specific anchors over hubs",
    )
    anchor_reuse: bool = knob(
        True,
        "rows of a step with common neighbours tend to draw the same one, so that fewer anchors are encoded; each "
        "row's own chances stay as anchor_sampling says",
    )
    anchor_budget: float = knob(
        0.5,
        "distinct anchors encoded per step at most, as a share of its documents and labels; which ones is drawn "
        "anew each step, rows whose anchor is left out skip it; 0 = no limit",
        ge=0,
        le=1000,
    )
    graph_negatives: float = knob(
        0.5,
        "share of base.random_labels that graphs name instead of chance: labels that share an anchor with a document "
        "of the step compete with its own, hard negatives that need no look at the encoder. 0 = none, as published",
        "PinSage",
        ge=0,
        le=1,
    )
    negative_sets: list[str] = knob([], "draw these negatives from these anchor sets only; empty = all")

    def check_anchor_sets(self, known: Collection[str]) -> None:
        """Raise ConfigError if a knob names an anchor set that is not among the known ones."""
        check_known(self.anchor_sets, known, "objective.anchor_sets")
        check_known(self.negative_sets, known, "objective.negative_sets")
        regularisers = [f"{name}.{side}" for name in self.anchor_sets or known for side in ("document", "label")]
        for name in self.lambdas:
            if name not in regularisers:
                left = " of objective.anchor_sets" if name.rpartition(".")[0] in known else ""
                raise ConfigError(f"objective.lambdas.{name}: no such regulariser{left}; {nearest(name, regularisers)}")

    @model_validator(mode="after")
    def _weights_are_not_negative(self) -> ObjectiveConfig:
        for name, weight in self.lambdas.items():
            if weight < 0:
                raise ValueError(f"lambdas.{name} = {weight}: a regularisation weight is at least 0")
            if weight > WEIGHT_MAX:
                raise ValueError(f"lambdas.{name} = {weight}: a regularisation weight is at most {WEIGHT_MAX:g}")
        return self

    def weight(self, anchor_set: str, side: Literal["document", "label"]) -> float:
        """The initial λ of one regulariser; 0 when graphs are off."""
        if not self.graphs or (self.anchor_sets and anchor_set not in self.anchor_sets):
            return 0.0
        default = self.lambda_document if side == "document" else self.lambda_label
        return float(self.lambdas.get(f"{anchor_set}.{side}", default))


class BanditConfig(Section):
    """Online tuning of the regularisation weights."""

    enabled: bool = knob(False, "tune the weights while training; false = they stay as objective says")
    estimator: Literal["rademacher", "paper", "stein", "reward"] = knob(
        "rademacher", "how a window's feedback becomes a slope; paper = P / z as printed", "R-ICLR 3"
    )
    feedback: Literal["heldout_loss", "accuracy", "task_loss", "weighted_objective"] = knob(
        "heldout_loss",
        "what a window is judged by: likelihood of held-out documents' labels, in-batch accuracy, task loss, or the "
        "whole weighted loss as published (which shrinks every weight, since each multiplies a positive loss)",
        "R-ICLR 3, xcai",
    )
    period: int = knob(30, "steps of a window", "R-ICLR 3", ge=1, le=1_000_000)
    sigma: float = knob(0.1, "standard deviation of the perturbation (variance 0.01)", "R-ICLR 3", gt=0, le=100)
    lr: float = knob(0.01, "learning rate of the weights", "R-ICLR 3", gt=0, le=100)
    baseline: bool = knob(True, "judge a window against a running mean of the windows before", "xcai")
    baseline_momentum: float = knob(0.8, "momentum of that mean and of the deviation", "xcai", ge=0, lt=1)
    normalise: bool = knob(
        True, "measure the difference to that mean in its running deviation, so that a step is about lr on any scale"
    )
    safeguards: bool = knob(True, "bound weights and steps; false = no bounds, as printed")
    max_step: float = knob(0.05, "a window moves a weight by at most this", gt=0, le=WEIGHT_MAX)
    lambda_min: float = knob(0.01, "least weight (gauge fixed_sum rescales after it)", ge=0, le=WEIGHT_MAX)
    lambda_max: float = knob(2.0, "greatest weight (gauge fixed_sum rescales after it)", gt=0, le=WEIGHT_MAX)
    gauge: Literal["fixed_task", "fixed_sum", "free"] = knob(
        "fixed_task", "fixed_task: the task's own weight is not tuned; fixed_sum: it is, and the sum stays; free: it is"
    )

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> BanditConfig:
        if self.lambda_min > self.lambda_max:
            raise ValueError(f"lambda_min = {self.lambda_min} exceeds lambda_max = {self.lambda_max}")
        return self


class BaseConfig(Section):
    """The base algorithm that RAMEN regularises."""

    name: str = knob("inbatch", "inbatch, ance, ngame, dexa, dexml or siamesexml")
    refresh_from: int = knob(
        2, "epoch before which the encoder is first looked at to cluster or mine", ge=0, le=EPOCHS_MAX
    )
    refresh_every: int = knob(2, "epochs between two looks", ge=1, le=EPOCHS_MAX)
    mined: int = knob(
        1, "ance, dexml: mined negatives per document and step, shared by the step", "DEXML", ge=0, le=1000
    )
    random_labels: float = knob(
        1.0,
        "labels drawn uniformly into each step, as a share of its rows (with graphs, objective.graph_negatives names "
        "some of them instead): they compete, and are pulled to their anchors where there are graphs; so rare labels "
        "take part. 0 = none, as published",
        ge=0,
        le=1000,
    )
    shortlist: int = knob(
        100, "ance, dexml: nearest labels, true ones left out, to draw from", "DEXML", ge=1, le=10_000
    )
    cluster_size: int = knob(4, "ngame, dexa: documents per cluster at first", "DEXA", ge=1, le=1_000_000)
    cluster_double_every: int = knob(2, "ngame, dexa: epochs in which clusters double", ge=1, le=EPOCHS_MAX)
    temperature: float = knob(0.05, "dexml: temperature of the decoupled softmax", "DEXML", ge=1e-4, le=100)
    labels_per_offset: int = knob(3, "dexa: labels that share an offset, on average", "xcai", ge=1, le=1_000_000)
    offset_heads: int = knob(
        1000, "dexa: most frequent labels that have an offset of their own", "DEXA", ge=0, le=INDEX_MAX
    )


class TrainingConfig(Section):
    """Optimisation, shared by warm-up and the prune-and-retrain rounds."""

    batch_size: int = knob(256, "documents per step, all processes together", ge=2, le=2**20)
    epochs: int | Literal["auto"] = knob(
        "auto",
        "epochs of warm-up and retraining together, with a linear decay of the learning rate; auto = train at a "
        "constant rate until the average of the weights no longer gains on held-out documents, and keep the average",
    )
    max_epochs: int = knob(40, "epochs=auto: epochs at most", ge=2, le=EPOCHS_MAX)
    max_minutes: float = knob(
        0.0, "epochs=auto: minutes that warm-up and retraining may take together; 0 = no limit", ge=0, le=1e7
    )
    warmup_epochs: int = knob(
        4, "epochs on the unpruned graphs; with epochs=auto at least 48 steps", ge=1, le=EPOCHS_MAX
    )
    lr: float = knob(1e-4, "peak learning rate", gt=0, le=1)
    lr_warmup_steps: int = knob(
        50,
        "steps in which the learning rate rises; with a given number of epochs half of all steps at most",
        ge=0,
        le=INDEX_MAX,
    )
    weight_decay: float = knob(0.01, "AdamW decay; none on biases and layer norms", "ngame", ge=0, le=100)
    adam_eps: float = knob(1e-6, "AdamW epsilon", "ngame", gt=0, le=1)
    clip_norm: float = knob(1.0, "gradient norm is clipped to this; 0 = off", ge=0, le=1e6)
    validation_fraction: float = knob(
        0.05,
        "share of training documents held out to decide when training ends, to choose the label context and the "
        "classifiers' share, to tell when pruning has settled, and for the bandit's heldout_loss; whole groups, if the "
        "dataset has them. With epochs=auto at least 500 documents, or a tenth of fewer than 5,000",
        ge=0,
        lt=0.5,
    )
    checkpoint_minutes: float = knob(10.0, "minutes between checkpoints inside an epoch loop", gt=0, le=1e6)
    gradient_caching: bool = knob(
        False,
        "compute vectors twice and keep the activations of one chunk (encoder.tokens_per_chunk) only: batches "
        "of any size in bounded memory, for about a third more time",
        "GradCache",
    )
    processes: int = knob(
        0,
        "processes that train together on this machine; 0 = one per GPU, or 1 where there is none",
        ge=0,
        le=THREADS_MAX,
    )
    threads: int = knob(
        0, "torch threads of each process; 0 = all cores, shared by the processes", ge=0, le=THREADS_MAX
    )
    seed: int = knob(0, "seed of initialisation, order, sampling and dropout", ge=0, le=SEED_MAX)

    @field_validator("epochs", mode="before")
    @classmethod
    def _epochs_are_a_number_or_auto(cls, value: Any) -> Any:
        number = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= EPOCHS_MAX
        if value != "auto" and not (number and value == int(value)):
            raise ValueError(f"{shown(value)}: expected a whole number from 1 to {EPOCHS_MAX}, or auto")
        return value if value == "auto" else int(value)

    @model_validator(mode="after")
    def _warmup_fits(self) -> TrainingConfig:
        if self.epochs != "auto" and self.max_minutes:
            raise ValueError(f"max_minutes = {self.max_minutes:g} needs epochs = auto, not {self.epochs}")
        if self.epochs != "auto" and self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs = {self.warmup_epochs} exceeds epochs = {self.epochs}; set both")
        return self


Distance = Literal["l2", "mse"]
"""How far the encoder's vectors are from an oracle's."""


class GuidanceConfig(Section):
    """An oracle that reads metadata as text guides the encoder (MOGIC)."""

    enabled: bool = knob(
        False,
        "before the warm-up, train an oracle: the same base algorithm without graphs, on texts followed by those of "
        "their anchors. Its vectors then guide the encoder; it never serves",
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
    match_documents: float = knob(0.1, "weight: distance of documents to the oracle's", "M-blog", ge=0, le=WEIGHT_MAX)
    match_labels: float = knob(0.1, "weight: distance of labels to the oracle's", "M-blog", ge=0, le=WEIGHT_MAX)
    distance: Distance = knob(
        "l2", "l2 = mean norm of the difference; mse = mean of its squared elements, as released", "MOGIC, xcai"
    )


class PruningConfig(Section):
    """Prune-and-retrain rounds."""

    every: int = knob(
        4, "epochs trained between two prunings; with training.epochs=auto at least 48 steps", ge=1, le=EPOCHS_MAX
    )
    rule: Literal["quantile", "threshold"] = knob(
        "quantile",
        "what an edge must exceed to stay: a quantile of random pairs of its own graph, whatever the encoder's "
        "scale, or a fixed threshold as published",
        "rec; R-ICLR B",
    )
    quantile: float = knob(
        0.75, "an edge stays if its cosine exceeds that of this share of random pairs of its graph", ge=0, lt=1
    )
    threshold: float = knob(
        0.0, "rule threshold: an edge stays if the cosine of its ends is greater than this", "R-ICLR B", ge=-1, le=1
    )
    from_previous: bool = knob(False, "prune the previous round's graph (monotone) instead of the original", "xcai")
    converged_at: float = knob(
        0.995, "stop re-pruning when every graph's Jaccard with the last exceeds this", ge=0, le=1
    )
    patience: int = knob(
        3, "prune no more after this many rounds without a better validation P@1; 0 = always", ge=0, le=EPOCHS_MAX
    )
    enabled: bool = knob(True, "false = retrain on the unpruned graphs (ablation 'no pruning')")


class ClassifierConfig(Section):
    """The second stage of NGAME-type bases: a classifier per label on the frozen encoder."""

    enabled: bool = knob(True, "train classifiers where the base algorithm has a second stage")
    epochs: int = knob(30, "epochs over the documents' frozen vectors", ge=1, le=EPOCHS_MAX)
    batch_size: int = knob(2048, "documents per step", "ngame", ge=1, le=2**20)
    lr: float = knob(1e-3, "learning rate", "ngame", gt=0, le=1)
    positives: int = knob(2, "positives per document and step, drawn with repeats", "R-ICLR T16", ge=1, le=1000)
    negatives: int = knob(
        12, "negatives per document and step, drawn from its shortlist", "R-ICLR T16", ge=1, le=10_000
    )
    shortlist: int = knob(100, "nearest labels by the encoder, true ones left out", "ngame", ge=1, le=10_000)
    margin: float = knob(0.2, "margin of its triplet loss", "ngame", ge=0, le=2)
    dropout: float = knob(0.5, "dropout of the documents' vectors", "ngame", ge=0, lt=1)


class ScoringConfig(Section):
    """Retrieval and metrics on the test documents."""

    retrieve: int = knob(200, "labels retrieved per document before filtering", "pyxclib", ge=100, le=2048)
    propensity_a: float = knob(0.55, "propensity A; Wikipedia-500K 0.5, Amazon 0.6", "pyxclib", gt=0, le=100)
    propensity_b: float = knob(1.5, "propensity B; Wikipedia-500K 0.4, Amazon 2.6", "pyxclib", gt=0, le=1000)
    quantiles: int = knob(5, "equi-volume label bins in the report", "R-ICLR", ge=1, le=100)
    quantile_rule: Literal["pyxclib", "paper"] = knob("pyxclib", "how the bins are cut", "pyxclib")
    chunk: int = knob(4096, "documents scored at a time (bounds memory)", ge=1, le=2**20)
    links: bool = knob(
        False, "also rank each set's anchors for the training documents: R@100 of their raw links", "R-ICLR T6"
    )
    samples: int = knob(12, "sample predictions in the report", ge=0, le=1000)
    peers: list[Literal["tfidf", "untrained"]] = knob(
        ["tfidf", "untrained"],
        "also evaluate these peers on the same test documents: TF-IDF, and the encoder before training; takes seconds, "
        "minutes at a million labels. [] = none",
    )
    base: str = knob("", "evaluation artifact of another run (the base), set beside this one in metrics and report")


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
    memory_gb: float = knob(16.0, "auto, ivf: what the index may take in the server's memory", gt=0, le=1e6)
    hnsw_m: int = knob(32, "links per node of the HNSW graph", "ngame", ge=2, le=256)
    ef_construction: int = knob(200, "candidates while building the HNSW graph", "ngame", ge=8, le=100_000)
    ef_search: int = knob(128, "candidates while searching the HNSW graph", "ngame", ge=8, le=100_000)
    nprobe: int = knob(
        0, "inverted lists that are searched; 0 = the smallest power of two that reaches min_recall", ge=0, le=2**20
    )
    build_threads: int = knob(
        0,
        "threads that build the index; 1 = same bytes every time, 0 = 1 up to 100,000 labels, else all cores",
        ge=0,
        le=THREADS_MAX,
    )
    recall_k: int = knob(10, "ANN recall is measured at this depth against exact retrieval", ge=1, le=1000)
    min_recall: float = knob(0.9, "gate: the alias moves only if ANN recall is at least this", ge=0, le=1)
    max_query_ms: float = knob(
        0.0,
        "gate: the alias moves only if the median query, run alone, takes at most this; 0 = no limit",
        ge=0,
        le=1e9,
    )
    gate: dict[str, float] = knob(
        {"psp_at_5": 0.0},
        "gate: metric, such as p_at_1 or tail/psp_at_5 -> points it may lose against the version that holds the "
        "alias, both on this dataset's test documents; {} = no comparison",
    )
    model: str = knob(
        "ramen",
        "registered model name in MLflow; empty = write the retriever without registering it, the only way "
        "when tracking is off",
    )
    alias: str = knob("champion", "alias that moves to the published version; empty = none")

    @field_validator("kind")
    @classmethod
    def _kind_is_known(cls, value: str) -> str:
        if value in INDEX_KINDS:
            return value
        if not re.fullmatch(r"[A-Z][A-Za-z0-9_,()]{0,199}", value):
            raise ValueError(f"expected {', '.join(INDEX_KINDS)}, or a faiss factory string such as IVF4096,PQ48")
        for token, number in re.findall(r"(IMI2x|[A-Za-z_]+)(\d+)", value):
            # a faiss factory takes any number: 0 ends the process, and codes of 24 bits take 50 GB
            largest = {"IMI2x": 10, "x": 16, "HNSW": 256}.get(token.lstrip("_"), FACTORY_MAX)
            if not 1 <= int(number[:10]) <= largest:
                raise ValueError(f"{value!r}: expected a number from 1 to {largest} in {token}{number}")
        return value

    @field_validator("alias")
    @classmethod
    def _alias_is_a_name(cls, value: str) -> str:
        # MLflow keeps latest and v1 for itself; a number would stand for the version of that number
        if value and (
            not re.fullmatch(r"[A-Za-z_][\w-]{0,99}", value, re.A) or re.fullmatch(r"(?i)latest|v\d+", value)
        ):
            raise ValueError(f"{value!r}: expected a name of letters, digits, - and _, not latest, a number or v1")
        return value

    @field_validator("model")
    @classmethod
    def _model_is_a_name(cls, value: str) -> str:
        if re.search(r"[/:@%?#\\]", value) or value != value.strip() or len(value) > 200:
            raise ValueError(f"{shown(value)}: expected a name without / : @ % ? #, or nothing")
        return value

    @field_validator("gate")
    @classmethod
    def _gate_names_metrics(cls, value: dict[str, float]) -> dict[str, float]:
        for metric in value:
            if not re.fullmatch(r"([\w-]+/)*[\w-]+_at_\d+", metric):
                raise ValueError(f"{shown(metric)} is no metric; expected one such as psp_at_5 or tail/p_at_1")
            if abs(value[metric]) > 100:
                raise ValueError(f"{metric} = {value[metric]:g}: expected points of at most 100")
        return value


SECTIONS: dict[str, type[Section]] = {
    "data": DataConfig,
    "walk": WalkConfig,
    "encoder": EncoderConfig,
    "objective": ObjectiveConfig,
    "bandit": BanditConfig,
    "base": BaseConfig,
    "training": TrainingConfig,
    "guidance": GuidanceConfig,
    "pruning": PruningConfig,
    "classifier": ClassifierConfig,
    "scoring": ScoringConfig,
    "index": IndexConfig,
}


class Config(BaseModel):
    """The whole tree."""

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
        """Complete sections as plain dicts, in the order of `SECTIONS`."""
        wanted = set(SECTIONS if names is None else names)
        return {name: getattr(self, name).model_dump() for name in SECTIONS if name in wanted}


def presets() -> list[str]:
    """Names of the presets that ship with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def resolve(
    *,
    preset: str | None = None,
    params: str | Path | None = None,
    sets: Iterable[str] = (),
) -> Config:
    """Resolve the configuration: defaults < preset < parameter file < `--set`.

    Args:
        preset: name of a shipped preset, or None.
        params: parameter file; None reads params.yaml of the working directory if there is one and no preset is
            named.
        sets: assignments `section.key=value`; the value is read as YAML. `section.key.entry=value` sets one entry of a
            knob that is a mapping.

    Raises:
        ConfigError: unknown preset, section or key (with the nearest valid name), or a value out of range.
    """
    tree: dict[str, Any] = {}
    origin: dict[tuple[str, ...], str] = {}
    if preset is not None:
        for name in _extended(preset):
            values = _read(PRESETS / f"{name}.yaml")
            values.pop(EXTENDS, None)
            _merge(tree, values, f"preset {name}")
    if params is None and preset is None and Path(PARAMS_FILE).is_file():
        params = PARAMS_FILE
    if params is not None:
        given = _read(Path(params))
        _merge(tree, given, str(params))
        origin = {(section, key): str(params) for section, values in given.items() for key in values or ()}
    for assignment in sets:
        section, key = _assign(tree, assignment)
        origin.pop((section, key), None)
        origin[section,] = ""  # two values contradict each other: the file is not alone to blame
    return parse(tree, origin)


def _extended(preset: str) -> list[str]:
    """A preset and those it extends, the most general first."""
    chain: list[str] = []
    name: str | None = preset
    while name is not None:
        if name not in presets():
            raise ConfigError(f"preset {name!r}: unknown; {nearest(name, presets())}")
        chain.insert(0, name)
        name = _read(PRESETS / f"{name}.yaml").get(EXTENDS)
    return chain


def parse(tree: Mapping[str, Any], origin: Mapping[tuple[str, ...], str] | None = None) -> Config:
    """Validate a nested mapping into a Config.

    Args:
        tree: section -> key -> value.
        origin: (section, key) -> the file that a value was read from; named in messages.

    Raises:
        ConfigError: one line per wrong value.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(*_explain(error, origin or {})) from None


def parse_section(name: str, values: Mapping[str, Any]) -> Section:
    """Validate one section. Raises ConfigError."""
    _check_keys({name: values}, name)
    return getattr(parse({name: values}), name)  # type: ignore[no-any-return]


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `ramen config > {path}` writes a complete one") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {_TYPES[type(tree)]}")
    return tree


_TYPES = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
"""What YAML holds at its top -> its name in messages."""


def _assign(tree: dict[str, Any], text: str) -> tuple[str, str]:
    """Carry out one `section.key=value` and return section and key.

    `section.key.entry=value` changes one entry of a knob that is a mapping.
    """
    where = f"--set {_name(text)}"
    path, equals, value = text.partition("=")
    parts = path.strip().split(".", 2)
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"{where}: expected section.key=value, e.g. training.epochs=5")
    section, key, *entry = parts
    _check_keys({section: {key: None}}, "--set")
    field = SECTIONS[section].model_fields[key]
    parsed: Any
    if lone_surrogate(value):  # not YAML either; the knob's own check says so
        parsed = value
    elif field.annotation is str and not value.strip().startswith(("'", '"')):
        parsed = _uncommented(value)  # a folder may be named 2024, or [x
    else:
        parsed = parse_yaml(value, where) if value.strip() else ""
    if entry:  # objective.lambdas.depends.label=0.3
        before = tree.get(section, {}).get(key, field.default)
        if not isinstance(before, Mapping):
            raise ConfigError(f"{where}: {section}.{key} has no entries; expected {section}.{key}=value")
        parsed = {**before, entry[0]: parsed}
    tree.setdefault(section, {})[key] = parsed
    return section, key


def _uncommented(value: str) -> str:
    """Plain text without blanks at its ends and without a YAML comment."""
    return re.split(r"(?:^|\s)#", value, maxsplit=1)[0].strip()


def _merge(tree: dict[str, Any], update: Mapping[str, Any], where: str) -> None:
    """Put values over those that are there; a mapping, too, is replaced as a whole."""
    _check_keys(update, where)
    for section, values in update.items():
        tree.setdefault(section, {}).update(values or {})


def _check_keys(tree: Mapping[str, Any], where: str) -> None:
    for section, values in tree.items():
        if section not in SECTIONS:
            raise ConfigError(f"{where}: {_name(section)}: unknown section; {nearest(str(section), SECTIONS)}")
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(f"{where}: {section}: expected a mapping, found {shown(values)}")
        fields = SECTIONS[section].model_fields
        for key in values or ():
            if key not in fields:
                raise ConfigError(f"{where}: {section}.{_name(key)}: unknown; {nearest(str(key), fields)}")


def _name(key: Any) -> str:
    text = str(key)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _explain(error: ValidationError, origin: Mapping[tuple[str, ...], str]) -> list[str]:
    lines = []
    for item in error.errors():
        section, *key = map(str, item["loc"])
        files = {origin.get((section, key[0]), "")} if key else {origin[at] for at in origin if at[0] == section}
        where = "".join(f"{file}: " for file in files if file and len(files) == 1)
        path = ".".join(_name(part) for part in (section, *key))
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "value_error":
            lines.append(f"{where}{path}: {message}")
        elif item["type"] == "list_type" and isinstance(item["input"], str):
            lines.append(f"{where}{path} = {shown(item['input'])}: expected a list, as in [{_name(item['input'])}]")
        else:
            lines.append(f"{where}{path} = {shown(item['input'])}: {message[0].lower()}{message[1:]}")
    return lines


def describe_range(field: Any) -> str:
    """Human-readable range of a pydantic field: choices or bounds."""
    annotation = field.annotation
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


def to_yaml(config: Config) -> str:
    """The whole tree as a complete, commented parameter file."""
    lines = ["# Every knob with its value; `ramen config [--preset P]` writes this file. Docs: docs/config.md"]
    for name, section in SECTIONS.items():
        lines += ["", f"# {(section.__doc__ or '').splitlines()[0]}", f"{name}:"]
        values = getattr(config, name)
        for key, field in section.model_fields.items():
            value = dump_yaml(getattr(values, key))
            extent = describe_range(field)
            lines.append(f"  {key}: {value}  # {field.description}" + (f" [{extent}]" if extent else ""))
    return "\n".join(lines) + "\n"
