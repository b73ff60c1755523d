"""The encoder against sentence-transformers and transformers, and the token store against the tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ramen.config import EncoderConfig
from ramen.encoder.loading import load_encoder, load_trained
from ramen.encoder.model import SentenceEncoder, use_bf16
from ramen.encoder.packing import assign, row_length
from ramen.encoder.tokens import TextTable, TokenStore
from ramen.errors import RamenError

TEXTS = ["numpy: fast arrays", "", "a", "web server with TLS and HTTP/2 support " * 3, "größe 数学 données", "a"]


@pytest.mark.parametrize("name", ["minilm", "tiny"])
def test_a_saved_encoder_loads_in_sentence_transformers_and_gives_the_same_vectors(name: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    ours = load_encoder(name, EncoderConfig(name=name, precision="fp32"))
    ours.save(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert theirs.max_seq_length == 32
    np.testing.assert_allclose(ours.encode(TEXTS), theirs.encode(TEXTS), atol=1e-5)


def test_a_saved_encoder_loads_in_transformers_and_in_ramen(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    ours = load_encoder("tiny", EncoderConfig(precision="fp32", max_length=16))
    ours.save(tmp_path)
    again = load_encoder(tmp_path, EncoderConfig(precision="fp32", max_length=64))
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
    big = load_encoder("tiny", EncoderConfig(precision="fp32"))
    small = load_encoder("tiny", EncoderConfig(precision="fp32", tokens_per_chunk=64))
    vectors = big.encode(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(vectors, small.encode(TEXTS), atol=1e-6)
    np.testing.assert_allclose(vectors[2], vectors[5], atol=1e-6)
    np.testing.assert_allclose(vectors[3], big.encode([TEXTS[3]])[0], atol=1e-6)


def test_cls_pooling_takes_the_first_token(tmp_path: Path) -> None:
    encoder = load_encoder("tiny", EncoderConfig(precision="fp32", pooling="cls"))
    encoder.save(tmp_path)
    assert load_encoder(tmp_path, EncoderConfig(precision="fp32")).pooling == "cls"
    assert load_encoder(tmp_path, EncoderConfig(pooling="mean")).pooling == "mean", (
        "to start from, it is the knob that says"
    )
    assert load_trained(tmp_path, EncoderConfig(pooling="mean")).pooling == "cls", (
        "once trained, what it was trained with"
    )
    assert not np.allclose(encoder.encode(TEXTS), load_encoder("tiny", EncoderConfig(precision="fp32")).encode(TEXTS))


def test_bf16_stays_within_a_hundredth_of_cosine_distance() -> None:
    exact = load_encoder("minilm", EncoderConfig(precision="fp32")).encode(TEXTS[2:5])
    quick = load_encoder("minilm", EncoderConfig(precision="bf16")).encode(TEXTS[2:5])
    assert (exact * quick).sum(1).min() > 0.99


def test_an_unknown_encoder_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries again and again
    with pytest.raises(RamenError, match="encoder 'nobody/nothing': cannot be loaded") as caught:
        load_encoder("nobody/nothing", EncoderConfig())
    assert "\n" not in str(caught.value)


def test_the_store_holds_exactly_the_tokenizers_tokens() -> None:
    tokenizer = load_encoder("tiny", EncoderConfig()).tokenizer
    store = TokenStore.build(tokenizer, TEXTS, 8)
    assert store.pad_id == tokenizer.pad_token_id and len(store) == len(TEXTS)
    for i, text in enumerate(TEXTS):
        expected = tokenizer(text, truncation=True, max_length=8)["input_ids"]
        assert store.ids[store.offsets[i] : store.offsets[i + 1]].tolist() == expected


def test_buckets_cover_every_text_once_within_the_budget() -> None:
    tokenizer = load_encoder("tiny", EncoderConfig()).tokenizer
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
    tokenizer = load_encoder("tiny", EncoderConfig()).tokenizer
    table = TextTable.build(tokenizer, {"documents": ["a", "b"], "labels": ["b", "c"], "anchors/x": ["a"]}, 8)
    assert len(table.store) == 3
    assert table.roles["documents"][1] == table.roles["labels"][0] and table.roles["anchors/x"][0] == 0


@pytest.mark.parametrize("name", ["tiny", "minilm"])
def test_the_dropout_knob_reaches_every_layer(name: str) -> None:
    store_of = {}
    for rate in (-1.0, 0.0):
        encoder = load_encoder(name, EncoderConfig(precision="fp32", dropout=rate)).train()
        store = TokenStore.build(encoder.tokenizer, TEXTS, 16)
        rows = np.arange(len(TEXTS), dtype=np.int64)
        with torch.no_grad():
            store_of[rate] = [encoder.encode_rows(store, rows) for _ in range(2)]
    assert not torch.equal(*store_of[-1.0]), "the model's own dropout is on while training"
    assert torch.equal(*store_of[0.0])


@pytest.mark.parametrize("lengths", [[3] * 40, [5, 64, 1, 33, 32, 64, 90], list(range(1, 60)), [200]])
def test_packs_hold_every_token_once_within_the_budget(lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 1000, sum(lengths)).astype(np.int32)
    store = TokenStore(tokens, np.concatenate([[0], np.cumsum(lengths)]), 0)
    seen = {}
    for places, pack in store.packs(np.arange(len(lengths)), 256):
        assert pack.ids.size <= max(256, 2 * row_length(max(lengths)))
        rows, slots = np.divmod(pack.cells, pack.num_slots)
        for place, row, slot in zip(places, rows, slots, strict=True):
            here = pack.slots[row] == slot
            np.testing.assert_array_equal(pack.positions[row][here], np.arange(lengths[place]))
            seen[int(place)] = pack.ids[row][here]
    for i in range(len(lengths)):
        np.testing.assert_array_equal(seen.pop(i), tokens[store.offsets[i] : store.offsets[i + 1]])
    assert not seen


def test_packing_leaves_little_padding_and_longest_first_fits_best() -> None:
    lengths = np.clip(np.random.default_rng(1).normal(19, 6, 500).astype(np.int64), 3, 32)
    rows, starts, slots = assign(lengths, 64)
    assert lengths.sum() > 0.96 * 64 * (rows.max() + 1)
    for row in range(rows.max() + 1):
        mine = np.flatnonzero(rows == row)
        assert sorted(slots[mine]) == list(range(len(mine)))
        order = mine[np.argsort(starts[mine])]
        np.testing.assert_array_equal(starts[order], np.concatenate([[0], np.cumsum(lengths[order])[:-1]]))


def architecture(kind: str) -> torch.nn.Module:
    from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel, RobertaConfig, RobertaModel

    torch.manual_seed(0)
    if kind == "distilbert":
        return DistilBertModel(DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=64, vocab_size=30522))
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    if kind == "roberta":
        return RobertaModel(RobertaConfig(vocab_size=30522, pad_token_id=1, **size), add_pooling_layer=False)
    return BertModel(BertConfig(vocab_size=30522, **size), add_pooling_layer=False)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_text_has_the_same_vector_and_gradient_packed_or_padded(kind: str, pooling: str) -> None:
    tokenizer = load_encoder("tiny", EncoderConfig()).tokenizer
    encoder = SentenceEncoder(architecture(kind), tokenizer, pooling, EncoderConfig(precision="fp32")).eval()  # type: ignore[arg-type]
    assert encoder.packs
    store = TokenStore.build(tokenizer, TEXTS, 48)
    vectors, gradients = [], []
    for packs in (True, False):
        encoder.__dict__["packs"] = packs
        encoder.zero_grad()
        out = encoder.encode_rows(store, np.arange(len(TEXTS)))
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        vectors.append(out.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None]))
    torch.testing.assert_close(vectors[0], vectors[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


def test_a_transformer_that_cannot_be_packed_is_padded() -> None:
    from transformers import MPNetConfig, MPNetModel

    torch.manual_seed(0)
    config = MPNetConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=30527
    )
    tokenizer = load_encoder("tiny", EncoderConfig()).tokenizer
    encoder = SentenceEncoder(
        MPNetModel(config, add_pooling_layer=False), tokenizer, "mean", EncoderConfig(precision="fp32")
    )
    vectors = encoder.encode(TEXTS)
    for i, text in enumerate(TEXTS):
        np.testing.assert_allclose(vectors[i], encoder.encode([text])[0], atol=1e-5)


def test_bf16_layers_give_nearly_the_gradients_of_float32() -> None:
    gradients = []
    for precision in ("fp32", "bf16"):
        encoder = load_encoder("minilm", EncoderConfig(name="minilm", precision=precision, dropout=0.0)).train()  # type: ignore[arg-type]
        store = TokenStore.build(encoder.tokenizer, [f"package number {i} does {i % 7} things" for i in range(64)], 32)
        out = encoder.encode_rows(store, np.arange(64))
        (out[:32] @ out[32:].T).logsumexp(1).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None]))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_vectors_are_those_of_the_weights_as_they_are_after_every_step(precision: str) -> None:
    """A fused optimiser does not raise the version of the parameters that it changes."""
    encoder = load_encoder("tiny", EncoderConfig(precision=precision, dropout=0.0))
    store = TokenStore.build(encoder.tokenizer, TEXTS, 16)
    texts = np.arange(len(TEXTS))
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        encoder.embed(store, texts)  # as validation does between epochs
        encoder.train()
        encoder.encode_rows(store, texts)[:, 0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        fresh = load_encoder("tiny", EncoderConfig(precision=precision, dropout=0.0))
        fresh.load_state_dict(encoder.state_dict())
        np.testing.assert_array_equal(encoder.embed(store, texts), fresh.embed(store, texts))


@pytest.mark.parametrize(
    ("features", "bf16"), [(["amx_bf16"], True), (["avx512_bf16"], True), (["avx512_f", "avx2"], False), ([], False)]
)
def test_bf16_is_taken_where_the_processor_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, features: list[str], bf16: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(features, True))
    assert use_bf16("auto", "cpu") == bf16
    assert use_bf16("bf16", "cpu") and not use_bf16("fp32", "cpu")


@pytest.mark.parametrize(("kind", "positions"), [("bert", 40), ("roberta", 38), ("mpnet", 38)])
def test_more_tokens_than_an_encoder_has_positions_are_refused(kind: str, positions: int, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    made = AutoConfig.for_model(kind, max_position_embeddings=40, vocab_size=30522, pad_token_id=1, **sizes)
    AutoModel.from_config(made).save_pretrained(tmp_path)
    load_encoder("tiny", EncoderConfig()).tokenizer.save_pretrained(tmp_path)
    texts = ["a long text " * 50]
    assert load_encoder(tmp_path, EncoderConfig(name=str(tmp_path), max_length=positions)).encode(texts).shape == (1, 8)
    with pytest.raises(RamenError, match=f"max_length = {positions + 1}, but it reads {positions} tokens; lower it"):
        load_encoder(tmp_path, EncoderConfig(name=str(tmp_path), max_length=positions + 1))
