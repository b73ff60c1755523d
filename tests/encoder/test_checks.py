"""An encoder that cannot be used is refused when it is loaded, in one line that names the file or the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ramen.config import EncoderConfig
from ramen.encoder.loading import load_encoder
from ramen.errors import RamenError

SETTINGS = EncoderConfig(precision="fp32")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / "good"
    load_encoder("tiny", SETTINGS).save(folder)
    return folder


def edit(name: str, **values: Any) -> Callable[[Path], object]:
    """Change keys of a JSON file."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(content | values), encoding="utf-8")

    return change


def put(name: str, content: bytes | str) -> Callable[[Path], object]:
    """Replace a file."""
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], object]:
    """Change the weights."""
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def without(*patterns: str) -> Callable[[Path], object]:
    """Delete files."""
    return lambda folder: [file.unlink() for pattern in patterns for file in folder.glob(pattern)]


def truncate(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000])


def pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def forget_words(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: i for word, i in vocabulary.items() if i < 104}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def shorten_table(folder: Path) -> None:
    edit("config.json", vocab_size=1000)(folder)
    table = "embeddings.word_embeddings.weight"
    tensors(lambda all: {**all, table: all[table][:1000].clone()})(folder)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without("tokenizer*"), "has no tokenizer"),
        (without("tokenizer.json"), "has no tokenizer"),
        (put("tokenizer.json", "{"), "tokenizer.json: not valid JSON"),
        (put("tokenizer.json", "[]"), "tokenizer.json: input should be a valid dictionary"),
        (put("tokenizer.json", b"\xff\xfe"), "tokenizer.json: not valid JSON"),
        (put("tokenizer.json", '{"version": "1.0"}'), "cannot be loaded"),
        (put("tokenizer_config.json", "{"), "tokenizer_config.json: not valid JSON"),
        (forget_words, "its vocabulary is missing or damaged"),
        (put("modules.json", "no"), "modules.json: not valid JSON"),
        (put("modules.json", '{"a": 1}'), "modules.json: input should be a valid list"),
        (put("modules.json", "[1]"), "modules.json: 0: input should be a valid dictionary"),
        (put("modules.json", "[{}]"), "has a None module"),
        (put("1_Pooling/config.json", "[]"), "1_Pooling/config.json: input should be"),
        (edit("1_Pooling/config.json", word_embedding_dimension=64), "width 64, but its transformer has 32"),
        (put("sentence_bert_config.json", '{"max_seq_length": "abc"}'), "max_seq_length = 'abc' is no length"),
        (put("sentence_bert_config.json", '{"max_seq_length": -3}'), "max_seq_length = -3 is no length"),
        (put("sentence_bert_config.json", '{"max_seq_length": 600}'), "max_length = 600, but it reads 512 tokens"),
        (truncate, "model.safetensors: damaged or truncated"),
        (put(WEIGHTS, b""), "model.safetensors: damaged or truncated"),
        (without(WEIGHTS), "found none"),
        (pickle, "found only pickled weights .pytorch_model.bin., which can run code"),
        (put("config.json", "{"), "config.json: not valid JSON"),
        (put("config.json", "{}"), "cannot be loaded"),
        (without("config.json"), "has no config.json"),
        (edit("config.json", hidden_size=64), r"is \(.*\), expected \("),
        (edit("config.json", num_attention_heads=7), "cannot be loaded"),
        (edit("config.json", model_type="gpt2"), "its weights lack"),
        (edit("config.json", model_type="mine", auto_map={"AutoModel": "code.Model", "AutoConfig": "code.Config"}),
         "contains custom code"),
        (tensors(lambda all: {key: value for key, value in all.items() if "layer.1" not in key}),
         "config.json: num_hidden_layers = 2, but the weights have 1 layers"),
        (edit("config.json", num_hidden_layers=-1), "num_hidden_layers = -1, but the weights have 2 layers"),
        (edit("config.json", num_hidden_layers=10_000_000), "num_hidden_layers = 10000000, but the weights have 2"),
        (edit("config.json", hidden_size=10**9), "config.json: hidden_size = 1000000000, but no dimension of"),
        (edit("config.json", hidden_size="x"), "config.json: hidden_size = 'x', but no dimension of the weights"),
        (edit("config.json", hidden_size=True), "config.json: hidden_size = True, but no dimension of the weights"),
        (edit("config.json", intermediate_size=-64), "config.json: intermediate_size = -64, but no dimension"),
        (edit("config.json", vocab_size=None), "config.json: vocab_size = None, but no dimension of the weights"),
        (edit("config.json", max_position_embeddings=10**9), "max_position_embeddings = 1000000000, but no dimension"),
        (edit("config.json", type_vocab_size=10**9), "type_vocab_size = 1000000000, expected at most 30522"),
        (edit("config.json", num_hidden_layers="x"), "num_hidden_layers = 'x', but the weights have 2 layers"),
        (tensors(lambda all: {f"other.{key}": value for key, value in all.items()}), "its weights lack 37 of 37 param"),
        (tensors(lambda all: {"other": torch.zeros(2)}), "but no dimension of the weights has this size"),
        (tensors(lambda all: {key: value * torch.nan for key, value in all.items()}), "are not finite"),
        (tensors(lambda all: {key: torch.zeros_like(value) for key, value in all.items()}), "the same vector"),
        (shorten_table, "has a token 30521, but the encoder embeds only 1000"),
    ],
)  # fmt: skip
def test_unusable_encoder_is_refused_in_one_line(
    damage: Callable[[Path], object], said: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    folder = tmp_path / "encoder"
    shutil.copytree(saved, folder)
    damage(folder)
    with pytest.raises(RamenError, match=said) as caught:
        load_encoder(folder, SETTINGS)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"encoder '{folder}': ")


def test_loading_changes_neither_modes_nor_random_numbers(saved: Path) -> None:
    load_encoder(saved, SETTINGS)  # what is loaded once draws nothing
    torch.manual_seed(3)
    encoder = load_encoder(saved, SETTINGS)
    after = torch.rand(3)
    torch.manual_seed(3)
    transformers_draw = load_encoder(saved, SETTINGS)
    assert torch.equal(after, torch.rand(3))
    assert encoder.training and not encoder.transformer.training
    assert transformers_draw.training
