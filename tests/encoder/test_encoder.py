"""The encoder against sentence-transformers and transformers, and the token store against the tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ramen.config import Encoder
from ramen.encoder.model import load_encoder
from ramen.encoder.tokens import TextTable, TokenStore
from ramen.errors import RamenError

TEXTS = ["numpy: fast arrays", "", "a", "web server with TLS and HTTP/2 support " * 3, "größe 数学 données", "a"]


@pytest.mark.parametrize("name", ["minilm", "tiny"])
def test_a_saved_encoder_loads_in_sentence_transformers_and_gives_the_same_vectors(name: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    ours = load_encoder(name, Encoder(name=name, precision="fp32"))
    ours.save(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert theirs.max_seq_length == 32
    np.testing.assert_allclose(ours.encode(TEXTS), theirs.encode(TEXTS), atol=1e-5)


def test_a_saved_encoder_loads_in_transformers_and_in_ramen(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    ours = load_encoder("tiny", Encoder(precision="fp32", max_length=16))
    ours.save(tmp_path)
    again = load_encoder(tmp_path, Encoder(precision="fp32", max_length=64))
    assert again.settings.max_length == 16, "a saved encoder keeps its own length"
    np.testing.assert_array_equal(ours.encode(TEXTS), again.encode(TEXTS))
    model, tokenizer = AutoModel.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer(TEXTS, padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**tokens).last_hidden_state
    weight = tokens["attention_mask"].unsqueeze(-1)
    mean = (hidden * weight).sum(1) / weight.sum(1)
    np.testing.assert_allclose(ours.encode(TEXTS), torch.nn.functional.normalize(mean, dim=1).numpy(), atol=1e-5)


def test_vectors_are_unit_norm_in_the_callers_order_whatever_the_chunk() -> None:
    big = load_encoder("tiny", Encoder(precision="fp32"))
    small = load_encoder("tiny", Encoder(precision="fp32", tokens_per_chunk=64))
    vectors = big.encode(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(vectors, small.encode(TEXTS), atol=1e-6)
    np.testing.assert_array_equal(vectors[2], vectors[5])
    np.testing.assert_allclose(vectors[3], big.encode([TEXTS[3]])[0], atol=1e-6)


def test_cls_pooling_takes_the_first_token(tmp_path: Path) -> None:
    encoder = load_encoder("tiny", Encoder(precision="fp32", pooling="cls"))
    encoder.save(tmp_path)
    assert load_encoder(tmp_path, Encoder(precision="fp32")).pooling == "cls"
    assert not np.allclose(encoder.encode(TEXTS), load_encoder("tiny", Encoder(precision="fp32")).encode(TEXTS))


def test_bf16_stays_within_a_hundredth_of_cosine_distance() -> None:
    exact = load_encoder("minilm", Encoder(precision="fp32")).encode(TEXTS[2:5])
    quick = load_encoder("minilm", Encoder(precision="bf16")).encode(TEXTS[2:5])
    assert (exact * quick).sum(1).min() > 0.99


def test_an_unknown_encoder_is_one_clear_line() -> None:
    with pytest.raises(RamenError, match="encoder 'nobody/nothing': cannot be loaded") as caught:
        load_encoder("nobody/nothing", Encoder())
    assert "\n" not in str(caught.value)


def test_the_store_holds_exactly_the_tokenizers_tokens(tmp_path: Path) -> None:
    tokenizer = load_encoder("tiny", Encoder()).tokenizer
    store = TokenStore.build(tokenizer, TEXTS, 8)
    store.save(tmp_path)
    mapped = TokenStore.load(tmp_path)
    assert mapped.pad_id == store.pad_id and len(mapped) == len(TEXTS)
    for i, text in enumerate(TEXTS):
        expected = tokenizer(text, truncation=True, max_length=8)["input_ids"]
        assert store.ids[store.offsets[i] : store.offsets[i + 1]].tolist() == expected
        assert mapped.ids[mapped.offsets[i] : mapped.offsets[i + 1]].tolist() == expected


def test_buckets_cover_every_text_once_within_the_budget() -> None:
    tokenizer = load_encoder("tiny", Encoder()).tokenizer
    texts = ["word " * n for n in np.random.default_rng(0).integers(0, 40, 300)]
    store = TokenStore.build(tokenizer, texts, 48)
    seen, padded = [], 0
    for where, batch in store.buckets(np.arange(300), 400):
        assert batch.ids.size <= 400 and batch.mask.sum(1).tolist() == store.lengths[where].tolist()
        seen += where.tolist()
        padded += batch.ids.size
    assert sorted(seen) == list(range(300))
    assert padded < 1.15 * store.lengths.sum(), "length buckets keep padding low"


def test_equal_texts_of_different_roles_share_one_number() -> None:
    tokenizer = load_encoder("tiny", Encoder()).tokenizer
    table = TextTable.build(tokenizer, {"documents": ["a", "b"], "labels": ["b", "c"], "anchors/x": ["a"]}, 8)
    assert len(table.store) == 3
    assert table.roles["documents"][1] == table.roles["labels"][0] and table.roles["anchors/x"][0] == 0


@pytest.mark.parametrize("name", ["tiny", "minilm"])
def test_the_dropout_knob_reaches_every_layer(name: str) -> None:
    store_of = {}
    for rate in (-1.0, 0.0):
        encoder = load_encoder(name, Encoder(precision="fp32", dropout=rate)).train()
        store = TokenStore.build(encoder.tokenizer, TEXTS, 16)
        rows = np.arange(len(TEXTS), dtype=np.int64)
        with torch.no_grad():
            store_of[rate] = [encoder.encode_rows(store, rows) for _ in range(2)]
    assert not torch.equal(*store_of[-1.0]), "the model's own dropout is on while training"
    assert torch.equal(*store_of[0.0])
