"""RAMEN's objective as a loss for sentence-transformers' trainer.

The task loss and the graph regularisers are those of `ramen.objective`, on the batch that the trainer hands over.
What the full pipeline has in addition is listed in docs/library.md, Loss for sentence-transformers.

Letters: B rows of the batch, L distinct labels, A distinct anchors, R rows with a neighbour, C anchors that
rows drew, D width, W tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from ramen.data.dataset import Dataset, Side
from ramen.encoder.model_card import bibtex
from ramen.graph.metadata import inverse_sqrt_degree
from ramen.objective.regulariser import Links, regulariser, weighted_sum
from ramen.objective.triplet import Reduction, Triplet
from ramen.sampling import RowSampler, keyed_rng

NO_NEIGHBOUR = ""
"""Text of a neighbour column where the item has no neighbour."""


class GraphRegularizedLoss(nn.Module):
    """Triplet loss on (query, label) pairs, plus graph regularisers on their neighbours (Mittal et al. 2025).

    Each query ranks the batch's labels; each query and each label with a neighbour ranks the batch's neighbours. Texts
    are compared by their tokens, so that no text is a negative of itself:

    - a query's negatives leave out labels that are true for it in any row of the batch, and its own text;
    - an item's negatives leave out anchors that are its neighbours in any row, its own text, and the texts of its true
      labels (or queries).

    Requirements:
        1. A dataset whose columns are query, positive (the text of a true label), and for each graph query_neighbour,
           positive_neighbour. The order of the columns counts, not their names, but none may be named label, which the
           trainer takes for a number. `training_rows` makes the columns of a ramen dataset.
        2. An empty text where an item has no neighbour; no prompts on the neighbour columns.

    Inputs:
        +------------------------------------------------------------------+--------+
        | Inputs                                                           | Labels |
        +==================================================================+========+
        | (query, positive, query_neighbour, positive_neighbour)           | none   |
        +------------------------------------------------------------------+--------+
        | (query, positive, query_neighbour_1, positive_neighbour_1, ...)  | none   |
        +------------------------------------------------------------------+--------+

    Args:
        model: a SentenceTransformer. Its vectors are normalised here.
        document_weight: weight of each query-side regulariser; `objective.lambda_document`.
        label_weight: weight of each label-side regulariser; `objective.lambda_label`.
        margin, hardest, temperature, reduction: of every triplet term, as in section `objective`.
        symmetric: regularise in both directions, rows rank anchors and anchors rank rows.

    Example:
        ::

            rows = datasets.Dataset.from_dict({
                "query": ["mutt", "thunderbird"],
                "positive": ["mail client", "mail client"],
                "query_neighbour": ["section mail", "section mail"],
                "positive_neighbour": ["section mail", ""],
            })
            trainer = SentenceTransformerTrainer(model=model, train_dataset=rows, loss=GraphRegularizedLoss(model))
            trainer.train()
    """

    def __init__(
        self,
        model: Any,
        document_weight: float = 0.1,
        label_weight: float = 0.1,
        margin: float = Triplet.margin,
        hardest: int = Triplet.hardest,
        temperature: float = Triplet.temperature,
        reduction: Reduction = Triplet.reduction,
        symmetric: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.document_weight, self.label_weight = document_weight, label_weight
        self.triplet = Triplet(margin, hardest, temperature, reduction)
        self.symmetric = symmetric
        self._empty: list[int] = list(model.tokenizer(NO_NEIGHBOUR)["input_ids"])

    def forward(self, sentence_features: Iterable[Mapping[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Return the weighted sum of all terms, a float32 scalar.

        Args:
            sentence_features: tokens of each column, in the order of the class's docstring.
            labels: ignored.

        Raises:
            ValueError: the columns are not a pair of texts and pairs of neighbours.
        """
        columns = [dict(features) for features in sentence_features]
        if len(columns) < 4 or len(columns) % 2:
            raise ValueError(
                f"GraphRegularizedLoss: found {len(columns)} text columns; expected query, positive, and of each graph "
                "query_neighbour, positive_neighbour"
            )
        ids, is_empty = text_ids(columns, self._empty)
        vectors = [nn.functional.normalize(self.model(features)["sentence_embedding"], dim=-1) for features in columns]
        terms = self.terms(vectors, ids, is_empty)
        return weighted_sum(terms, self.weights(terms))

    def terms(self, vectors: Sequence[Tensor], ids: Sequence[Tensor], is_empty: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the unweighted terms: "task", then "0.document" and "0.label" of the first graph, and so on.

        Args:
            vectors: per column, float [B, D], unit norm.
            ids: per column, int64 [B]; equal numbers are equal texts, in all columns.
            is_empty: per column, bool [B], where an item has no neighbour.
        """
        (queries_BD, labels_BD), (query_ids, label_ids) = vectors[:2], ids[:2]
        # pair (i, j) is true if any row of the batch has the text of query i and the text of label j
        true_BB = _any_common(_equal(query_ids, query_ids), _equal(label_ids, label_ids))
        column_B, first_L = _distinct(label_ids)
        mask_BL = (true_BB | _equal(query_ids, label_ids))[:, first_L]
        terms = {"task": self.triplet(queries_BD @ labels_BD[first_L].T, column_B, mask_BL)}
        for graph in range(len(vectors) // 2 - 1):
            pair = slice(2 * graph + 2, 2 * graph + 4)
            pool = _Pool(torch.cat(tuple(ids[pair])), ~torch.cat(tuple(is_empty[pair])))
            anchors_AD = torch.cat(tuple(vectors[pair]))[pool.first]
            query_links = pool.links(0, query_ids, label_ids, true_BB)
            label_links = pool.links(len(query_ids), label_ids, query_ids, true_BB.T)
            terms[f"{graph}.document"] = regulariser(queries_BD, anchors_AD, query_links, self.triplet, self.symmetric)
            terms[f"{graph}.label"] = regulariser(labels_BD, anchors_AD, label_links, self.triplet, self.symmetric)
        return terms

    def weights(self, names: Iterable[str]) -> dict[str, float]:
        """Return the weight of each term."""
        of_kind = {"task": 1.0, "document": self.document_weight, "label": self.label_weight}
        return {name: of_kind[name.rpartition(".")[2]] for name in names}

    def get_config_dict(self) -> dict[str, Any]:
        """Return the arguments, for sentence-transformers' model card."""
        weights = {"document_weight": self.document_weight, "label_weight": self.label_weight}
        return weights | asdict(self.triplet) | {"symmetric": self.symmetric}

    @property
    def citation(self) -> str:
        """BibTeX entry, for sentence-transformers' model card."""
        return bibtex("ramen")


class _Pool:
    """The distinct anchors of a graph in a batch.

    Args:
        ids: int64 [2B], texts of the queries' neighbours, then of the labels'.
        known: bool [2B], false where there is no neighbour.

    Attributes:
        first: int64 [A], for each anchor the first place among the 2B that holds it.
    """

    def __init__(self, ids: Tensor, known: Tensor) -> None:
        places = known.nonzero().squeeze(1)
        column, first = _distinct(ids[places])
        self.first = places[first]
        self._ids, self._known = ids, known
        self._column = torch.zeros_like(ids)
        self._column[places] = column

    def links(self, start: int, row_ids: Tensor, partner_ids: Tensor, true_BB: Tensor) -> Links:
        """Return one side's links to the pool.

        Args:
            start: place of the side's first neighbour among the 2B: 0 or B.
            row_ids, partner_ids: int64 [B], texts of the side's items and of the other side's.
            true_BB: bool, row x partner, known true pairs.
        """
        side = slice(start, start + len(row_ids))
        known_B, anchor_ids = self._known[side], self._ids[self.first]
        neighbour_BA = _equal(self._ids[side], anchor_ids) & known_B[:, None]
        # no negatives: neighbours of the same text in any row, the item itself, and its partners
        mask_BA = _any_common(_equal(row_ids, row_ids), neighbour_BA)
        mask_BA |= _equal(row_ids, anchor_ids) | _any_common(true_BB, _equal(partner_ids, anchor_ids))
        rows_R = known_B.nonzero().squeeze(1)
        positive_R = self._column[side][rows_R]
        drawn_C: Tensor = positive_R.unique()  # type: ignore[no-untyped-call]
        row_C = rows_R[_equal(drawn_C, positive_R).int().argmax(1)] if len(drawn_C) else drawn_C
        return Links(rows_R, positive_R, mask_BA, drawn_C, row_C)


def text_ids(columns: Sequence[Mapping[str, Tensor]], empty: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Number the distinct texts of a batch by their tokens.

    Args:
        columns: `input_ids` and `attention_mask`, int64 [B, W], of each column; widths may differ.
        empty: tokens of the empty text.

    Returns:
        Per column, int64 [B] numbers of texts, and bool [B], true for the empty text.
    """
    rows = []
    for features in columns:
        padding = features["attention_mask"] == 0
        tokens = features["input_ids"].masked_fill(padding, -1)
        rows.append(tokens.gather(1, padding.int().argsort(dim=1, stable=True)))  # some tokenizers pad on the left
    width = max(len(empty), *(tokens.shape[1] for tokens in rows))
    none = torch.tensor([list(empty)], dtype=torch.int64, device=rows[0].device)
    padded = [nn.functional.pad(tokens, (0, width - tokens.shape[1]), value=-1) for tokens in (*rows, none)]
    numbers = torch.unique(torch.cat(padded), dim=0, return_inverse=True)[1]
    ids = list(numbers[:-1].split([len(tokens) for tokens in rows]))
    return ids, [column == numbers[-1] for column in ids]


def training_rows(
    dataset: Dataset, graphs: Mapping[str, Mapping[str, sp.csr_matrix]], seed: int = 0
) -> dict[str, list[str]]:
    """Return the columns that the loss expects, with a row per true training pair.

    Args:
        dataset: from `ramen.load_dataset`.
        graphs: from `ramen.build_graph(dataset)`, at least one set.
        seed: of the draws; each row draws one neighbour of its query and one of its label from every graph, with
            chances of 1 / sqrt(edges of the anchor).

    Returns:
        "query", "positive", and for each anchor set "NAME_query_neighbour", "NAME_positive_neighbour"; `NO_NEIGHBOUR`
        where an item has none. `datasets.Dataset.from_dict` takes it as it is.
    """
    pairs = dataset.positives.tocoo()
    columns = {
        "query": [dataset.train.texts[row] for row in pairs.row],
        "positive": [dataset.labels.texts[label] for label in pairs.col],
    }
    for name, sides in graphs.items():
        texts = np.array([*dataset.anchor_sets[name].texts.texts, NO_NEIGHBOUR], object)
        weights = inverse_sqrt_degree({side: sides[side.role] for side in Side})
        for side, column, rows in (("documents", "query", pairs.row), ("labels", "positive", pairs.col)):
            edges = sides[side]
            sampler = RowSampler(edges.indptr, edges.indices, weights[edges.indices])
            drawn = np.full(len(rows), len(texts) - 1)
            at, anchors = sampler.draw(rows.astype(np.int64), keyed_rng(seed, f"training rows/{name}/{side}"))
            drawn[at] = anchors
            columns[f"{name}_{column}_neighbour"] = texts[drawn].tolist()
    return columns


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """Return which numbers of two lists are equal, bool [len(a), len(b)]."""
    return a[:, None] == b[None, :]


def _any_common(a: Tensor, b: Tensor) -> Tensor:
    """Return the boolean product of two bool matrices."""
    return (a.float() @ b.float()) > 0


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of each id among the distinct ones, int64 [n], and the first place of each distinct one."""
    distinct, column = torch.unique(ids, return_inverse=True)
    places = torch.arange(len(ids), device=ids.device)
    first = torch.full_like(distinct, len(ids)).scatter_reduce(0, column, places, "amin")
    return column, first
