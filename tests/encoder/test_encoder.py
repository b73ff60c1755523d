"""The encoder compared with sentence-transformers and transformers; token store and packing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ramen.config import EncoderConfig
from ramen.encoder.loading import load_encoder, load_trained
from ramen.encoder.model import SentenceEncoder, use_bf16
from ramen.encoder.packing import assign_rows, row_length
from ramen.encoder.tokens import TextTable, TokenStore
from ramen.errors import RamenError

TEXTS = ["numpy: fast arrays", "", "a", "web server with TLS and HTTP/2 support " * 3, "größe 数学 données", "a"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minilm", "tiny"])
def test_saved_encoder_gives_same_vectors_in_sentence_transformers(name: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    encoder = load_encoder(name, EncoderConfig(name=name, precision="fp32"))
    encoder.save(tmp_path / "model")
    reference = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert reference.max_seq_length == 32
    np.testing.assert_allclose(encoder.encode(TEXTS), reference.encode(TEXTS), atol=1e-5)


def test_saved_encoder_gives_same_vectors_in_transformers_and_ramen(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    encoder = load_encoder("tiny", EncoderConfig(precision="fp32", max_length=16))
    encoder.save(tmp_path)
    loaded = load_encoder(tmp_path, EncoderConfig(precision="fp32", max_length=64))
    assert loaded.settings.max_length == 16, "a saved encoder keeps its max_length"
    np.testing.assert_array_equal(encoder.encode(TEXTS), loaded.encode(TEXTS))
    model, tokenizer = AutoModel.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer(TEXTS, padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**tokens).last_hidden_state
    weight = tokens["attention_mask"].unsqueeze(-1)
    mean = (hidden * weight).sum(1) / weight.sum(1)
    np.testing.assert_allclose(encoder.encode(TEXTS), torch.nn.functional.normalize(mean, dim=1).numpy(), atol=1e-5)


def test_vectors_have_unit_norm_and_input_order_for_any_chunk_size() -> None:
    big = load_encoder("tiny", EncoderConfig(precision="fp32"))
    small = load_encoder("tiny", EncoderConfig(precision="fp32", tokens_per_chunk=64))
    vectors = big.encode(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(vectors, small.encode(TEXTS), atol=1e-6)
    np.testing.assert_allclose(vectors[2], vectors[5], atol=1e-6)
    np.testing.assert_allclose(vectors[3], big.encode([TEXTS[3]])[0], atol=1e-6)


def test_cls_pooling_is_saved_and_loaded(tmp_path: Path) -> None:
    encoder = load_encoder("tiny", EncoderConfig(precision="fp32", pooling="cls"))
    encoder.save(tmp_path)
    assert load_encoder(tmp_path, EncoderConfig(precision="fp32")).pooling == "cls"
    settings = EncoderConfig(pooling="mean")
    assert load_encoder(tmp_path, settings).pooling == "mean", "the knob overrides an initial encoder's pooling"
    assert load_trained(tmp_path, settings).pooling == "cls", "a trained model keeps its pooling"
    assert not np.allclose(encoder.encode(TEXTS), load_encoder("tiny", EncoderConfig(precision="fp32")).encode(TEXTS))


def test_bf16_vectors_are_close_to_float32() -> None:
    exact = load_encoder("minilm", EncoderConfig(precision="fp32")).encode(TEXTS[2:5])
    rounded = load_encoder("minilm", EncoderConfig(precision="bf16")).encode(TEXTS[2:5])
    assert (exact * rounded).sum(1).min() > 0.99


def test_unknown_encoder_raises_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # otherwise it retries
    with pytest.raises(RamenError, match="encoder 'nobody/nothing': cannot be loaded") as caught:
        load_encoder("nobody/nothing", EncoderConfig())
    assert "\n" not in str(caught.value)


def test_token_store_holds_tokens_of_tokenizer() -> None:
    tokenizer = load_encoder("tiny", EncoderConfig()).tokenizer
    store = TokenStore.build(tokenizer, TEXTS, 8)
    assert store.pad_id == tokenizer.pad_token_id and len(store) == len(TEXTS)
    for i, text in enumerate(TEXTS):
        expected = tokenizer(text, truncation=True, max_length=8)["input_ids"]
        assert store.ids[store.offsets[i] : store.offsets[i + 1]].tolist() == expected


def test_buckets_contain_every_text_once_within_budget() -> None:
    tokenizer = load_encoder("tiny", EncoderConfig()).tokenizer
    texts = ["word " * n for n in np.random.default_rng(0).integers(0, 40, 300)]
    store = TokenStore.build(tokenizer, texts, 48)
    seen, padded = [], 0
    for positions, batch in store.buckets(np.arange(300), 400):
        assert batch.ids.size <= 400 and batch.mask.sum(1).tolist() == store.lengths[positions].tolist()
        seen += positions.tolist()
        padded += batch.ids.size
    assert sorted(seen) == list(range(300))
    assert padded < 1.15 * store.lengths.sum(), "length buckets keep padding low"


def test_equal_texts_of_different_roles_share_a_number() -> None:
    tokenizer = load_encoder("tiny", EncoderConfig()).tokenizer
    table = TextTable.build(tokenizer, {"documents": ["a", "b"], "labels": ["b", "c"], "anchors/x": ["a"]}, 8)
    assert len(table.store) == 3
    assert table.roles["documents"][1] == table.roles["labels"][0] and table.roles["anchors/x"][0] == 0


@pytest.mark.parametrize("name", ["tiny", "minilm"])
def test_dropout_setting_applies_to_all_layers(name: str) -> None:
    vectors_of = {}
    for rate in (-1.0, 0.0):
        encoder = load_encoder(name, EncoderConfig(precision="fp32", dropout=rate)).train()
        store = TokenStore.build(encoder.tokenizer, TEXTS, 16)
        rows = np.arange(len(TEXTS), dtype=np.int64)
        with torch.no_grad():
            vectors_of[rate] = [encoder.encode_rows(store, rows) for _ in range(2)]
    assert not torch.equal(*vectors_of[-1.0]), "training uses the model's default dropout"
    assert torch.equal(*vectors_of[0.0])


@pytest.mark.parametrize("lengths", [[3] * 40, [5, 64, 1, 33, 32, 64, 90], list(range(1, 60)), [200]])
def test_packs_contain_every_token_once_within_budget(lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 1000, sum(lengths)).astype(np.int32)
    store = TokenStore(tokens, np.concatenate([[0], np.cumsum(lengths)]), 0)
    seen = {}
    for positions, pack in store.packs(np.arange(len(lengths)), 256):
        assert pack.ids.size <= max(256, 2 * row_length(max(lengths)))
        rows, slots = np.divmod(pack.cells, pack.num_slots)
        for position, row, slot in zip(positions, rows, slots, strict=True):
            is_text = pack.slots[row] == slot
            np.testing.assert_array_equal(pack.positions[row][is_text], np.arange(lengths[position]))
            seen[int(position)] = pack.ids[row][is_text]
    for i in range(len(lengths)):
        np.testing.assert_array_equal(seen.pop(i), tokens[store.offsets[i] : store.offsets[i + 1]])
    assert not seen


def test_assign_rows_leaves_little_padding_and_contiguous_texts() -> None:
    lengths = np.clip(np.random.default_rng(1).normal(19, 6, 500).astype(np.int64), 3, 32)
    rows, starts, slots = assign_rows(lengths, 64)
    assert lengths.sum() > 0.96 * 64 * (rows.max() + 1)
    for row in range(rows.max() + 1):
        texts = np.flatnonzero(rows == row)
        assert sorted(slots[texts]) == list(range(len(texts)))
        order = texts[np.argsort(starts[texts])]
        np.testing.assert_array_equal(starts[order], np.concatenate([[0], np.cumsum(lengths[order])[:-1]]))


def make_transformer(kind: str) -> torch.nn.Module:
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
def test_packed_and_padded_texts_have_same_vectors_and_gradients(kind: str, pooling: str) -> None:
    tokenizer = load_encoder("tiny", EncoderConfig()).tokenizer
    encoder = SentenceEncoder(make_transformer(kind), tokenizer, pooling, EncoderConfig(precision="fp32")).eval()  # type: ignore[arg-type]
    assert encoder.supports_packing
    store = TokenStore.build(tokenizer, TEXTS, 48)
    vectors, gradients = [], []
    for packed in (True, False):
        encoder.__dict__["supports_packing"] = packed
        encoder.zero_grad()
        out = encoder.encode_rows(store, np.arange(len(TEXTS)))
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        vectors.append(out.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None]))
    torch.testing.assert_close(vectors[0], vectors[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


def test_transformer_without_packing_support_uses_padding() -> None:
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


def test_bf16_gradients_are_close_to_float32() -> None:
    gradients = []
    for precision in ("fp32", "bf16"):
        encoder = load_encoder("minilm", EncoderConfig(name="minilm", precision=precision, dropout=0.0)).train()  # type: ignore[arg-type]
        store = TokenStore.build(encoder.tokenizer, [f"package number {i} does {i % 7} things" for i in range(64)], 32)
        out = encoder.encode_rows(store, np.arange(64))
        (out[:32] @ out[32:].T).logsumexp(1).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None]))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_embed_uses_current_weights_after_every_optimizer_step(precision: str) -> None:
    """A fused optimiser does not increment the version of the parameters that it changes."""
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
def test_auto_precision_uses_bf16_if_cpu_supports_it(
    monkeypatch: pytest.MonkeyPatch, features: list[str], bf16: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(features, True))
    assert use_bf16("auto", "cpu") == bf16
    assert use_bf16("bf16", "cpu") and not use_bf16("fp32", "cpu")


@pytest.mark.parametrize(("kind", "positions"), [("bert", 40), ("roberta", 38), ("mpnet", 38)])
def test_max_length_beyond_number_of_positions_is_refused(kind: str, positions: int, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = AutoConfig.for_model(kind, max_position_embeddings=40, vocab_size=30522, pad_token_id=1, **sizes)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    load_encoder("tiny", EncoderConfig()).tokenizer.save_pretrained(tmp_path)
    texts = ["a long text " * 50]
    assert load_encoder(tmp_path, EncoderConfig(name=str(tmp_path), max_length=positions)).encode(texts).shape == (1, 8)
    with pytest.raises(
        RamenError, match=f"max_length = {positions + 1}, but the model reads at most {positions} tokens; lower it"
    ):
        load_encoder(tmp_path, EncoderConfig(name=str(tmp_path), max_length=positions + 1))
