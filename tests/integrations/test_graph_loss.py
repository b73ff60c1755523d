"""The loss for sentence-transformers: its terms, its masks, and the example that trains with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

import ramen
from ramen.config import EncoderConfig
from ramen.encoder.loading import load_encoder
from ramen.integrations.sentence_transformers import GraphRegularizedLoss, text_ids, training_rows
from ramen.objective.regulariser import Links, regulariser
from ramen.objective.triplet import Triplet

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "graph_loss.py"
COLUMNS = (
    ["mutt reads mail", "postfix sends mail", "vim edits text", "nginx"],
    ["mail client", "mail server", "text editor", "web server"],
    ["section mail", "section mail", "section editors", ""],
    ["section net", "section mail", "", "section net"],
)


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny BERT."""
    folder = tmp_path_factory.mktemp("encoder")
    load_encoder("tiny", EncoderConfig()).save(folder)
    return folder


@pytest.fixture
def model(encoder_folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(encoder_folder), device="cpu").eval()


def tokenise(model: SentenceTransformer, columns: tuple[list[str], ...]) -> list[dict[str, Tensor]]:
    return [dict(model.tokenizer(texts, padding=True, return_tensors="pt")) for texts in columns]


def gradient(model: SentenceTransformer, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def bool_rows(*rows: str) -> Tensor:
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


def encode(model: SentenceTransformer, texts: list[str]) -> Tensor:
    (tokens,) = tokenise(model, (texts,))
    return model(tokens)["sentence_embedding"]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("reduction", ["softmax", "mean", "sum_all"])
def test_gradient_equals_that_of_terms_of_ramen_objective(
    model: SentenceTransformer, reduction: str, symmetric: bool
) -> None:
    loss = GraphRegularizedLoss(model, 0.3, 0.7, reduction=reduction, symmetric=symmetric)
    found = gradient(model, loss(tokenise(model, COLUMNS)))

    triplet = Triplet(reduction=reduction)
    x, z = encode(model, COLUMNS[0]), encode(model, COLUMNS[1])
    anchors = encode(model, ["section mail", "section editors", "section net"])
    # anchors:                      mail, editors, net
    documents = Links(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1]), bool_rows("x..", "x..", ".x.", "..."),
                      torch.tensor([0, 1]), torch.tensor([0, 2]))  # fmt: skip
    labels = Links(torch.tensor([0, 1, 3]), torch.tensor([2, 0, 2]), bool_rows("..x", "x..", "...", "..x"),
                   torch.tensor([0, 2]), torch.tensor([1, 0]))  # fmt: skip
    loss_of_terms = (
        triplet(x @ z.T, torch.arange(4), torch.eye(4, dtype=torch.bool))
        + 0.3 * regulariser(x, anchors, documents, triplet, symmetric)
        + 0.7 * regulariser(z, anchors, labels, triplet, symmetric)
    )
    expected = gradient(model, loss_of_terms)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-4)
    assert any(value.abs().max() > 1e-3 for value in found.values())


def test_false_negatives_are_masked(model: SentenceTransformer) -> None:
    """Queries 0 and 2 have the same text: the labels and neighbours of both rows are no negatives of either."""
    columns = (
        ["mutt", "vim", "mutt"],
        ["mail client", "text editor", "terminal program"],
        ["section mail", "section editors", "section terminal"],
        ["", "mutt", "mail client"],
    )
    loss, masks = GraphRegularizedLoss(model), list[Tensor]()
    triplet = loss.triplet

    def record(scores: Tensor, positive: Tensor, mask: Tensor) -> Tensor:
        masks.append(mask)
        return triplet(scores, positive, mask)

    loss.triplet, loss.symmetric = record, False  # type: ignore[assignment]
    inputs = tokenise(model, columns)
    loss(inputs)
    task, documents, labels = masks
    # the columns are in the order of `torch.unique` over text ids: map ids to texts
    ids, empty = text_ids(inputs, model.tokenizer("")["input_ids"])
    names = {
        int(number): text
        for row, texts in zip(ids, columns, strict=True)
        for number, text in zip(row, texts, strict=True)
    }
    label_names = [names[int(number)] for number in torch.unique(ids[1])]
    anchor_names = [names[int(number)] for number in torch.unique(torch.cat(ids[2:])[~torch.cat(empty[2:])])]

    def masked(mask: Tensor, among: list[str]) -> list[set[str]]:
        return [{name for name, out in zip(among, row, strict=True) if out} for row in mask.tolist()]

    assert masked(task, label_names) == [
        {"mail client", "terminal program"}, {"text editor"}, {"mail client", "terminal program"}
    ]  # fmt: skip
    mutt = {"section mail", "section terminal", "mutt", "mail client"}  # its neighbours, its text, its label
    assert masked(documents, anchor_names) == [mutt, {"section editors"}, mutt]
    # label rows 1 and 2 have neighbours; masked are these, the text of the label and of its queries
    assert masked(labels, anchor_names) == [{"mutt"}, {"mail client", "mutt"}]


def test_batch_without_neighbours_has_the_task_loss(model: SentenceTransformer) -> None:
    columns = (*COLUMNS[:2], [""] * 4, [""] * 4)
    loss = GraphRegularizedLoss(model)
    x, z = encode(model, COLUMNS[0]), encode(model, COLUMNS[1])
    expected = loss.triplet(x @ z.T, torch.arange(4), torch.eye(4, dtype=torch.bool))
    torch.testing.assert_close(loss(tokenise(model, columns)), expected)


def test_each_graph_adds_two_terms(model: SentenceTransformer) -> None:
    one_graph, two_graphs = (loss(tokenise(model, columns)) for loss, columns in (
        (GraphRegularizedLoss(model), COLUMNS), (GraphRegularizedLoss(model, 0.05, 0.05), COLUMNS + COLUMNS[2:])
    ))  # fmt: skip
    torch.testing.assert_close(one_graph, two_graphs)


def test_padding_side_does_not_change_which_texts_are_equal(model: SentenceTransformer) -> None:
    texts = (["a", "a longer text", ""], ["a longer text", "a", "b"])
    found = []
    for side in ("left", "right"):
        model.tokenizer.padding_side = side
        ids, empty = text_ids(tokenise(model, texts), model.tokenizer("")["input_ids"])
        found.append((torch.cat(ids)[:, None] == torch.cat(ids), torch.cat(empty)))
    flat = np.array(texts).ravel()
    for equal, empty in found:
        assert equal.tolist() == (flat[:, None] == flat).tolist()
        assert empty.tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_other_numbers_of_columns_are_refused(model: SentenceTransformer, count: int) -> None:
    with pytest.raises(ValueError, match=f"found {count} text columns; expected query, positive"):
        GraphRegularizedLoss(model)(tokenise(model, (COLUMNS * 2)[:count]))


def test_training_rows_are_true_pairs_with_their_neighbours(shared_dataset: ramen.Dataset) -> None:
    rows = training_rows(shared_dataset, ramen.build_graph(shared_dataset))
    assert list(rows)[2:] == [
        f"{name}_{side}_neighbour" for name in ("category", "links") for side in ("query", "positive")
    ]
    place = {text: number for number, text in enumerate(shared_dataset.labels.texts)}
    anchors = shared_dataset.anchor_sets["category"]
    assert len(rows["query"]) == shared_dataset.positives.nnz
    for query, positive, of_query, of_positive in zip(*list(rows.values())[:4], strict=True):
        documents = [i for i, text in enumerate(shared_dataset.train.texts) if text == query]
        assert shared_dataset.positives[documents, place[positive]].sum() > 0
        assert of_query in {anchors.texts.texts[j] for i in documents for j in anchors.train[i].indices}
        assert of_positive in {anchors.texts.texts[j] for j in anchors.labels[place[positive]].indices}
    assert rows == training_rows(shared_dataset, ramen.build_graph(shared_dataset))
    assert rows != training_rows(shared_dataset, ramen.build_graph(shared_dataset), seed=1)


@pytest.mark.slow
def test_example_trains_with_the_trainer(encoder_folder: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXAMPLE), "--model", str(encoder_folder), "--steps", "3", "--out", "model"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "p_at_1" in done.stdout
    trained, start = (SentenceTransformer(str(path), device="cpu") for path in (tmp_path / "model", encoder_folder))
    assert not np.allclose(trained.encode(["mail"]), start.encode(["mail"]))
    assert "loss:GraphRegularizedLoss" in (tmp_path / "model" / "README.md").read_text()
