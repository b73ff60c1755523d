"""Loading an unusable encoder raises a one-line error that names the file or the reason."""

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
from ramen.encoder.model import SETTINGS_FILE
from ramen.errors import RamenError

SETTINGS = EncoderConfig(precision="fp32")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / "good"
    load_encoder("tiny", SETTINGS).save(folder)
    return folder


def edit(name: str, **values: Any) -> Callable[[Path], object]:
    """Set keys of a JSON file."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(content | values), encoding="utf-8")

    return change


def write(name: str, content: bytes | str) -> Callable[[Path], object]:
    """Replace a file."""
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def edit_weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], object]:
    """Change the weights."""
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def delete_files(*patterns: str) -> Callable[[Path], object]:
    """Delete files."""
    return lambda folder: [file.unlink() for pattern in patterns for file in folder.glob(pattern)]


def truncate_weights(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000])


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def shrink_vocabulary(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: i for word, i in vocabulary.items() if i < 104}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def shrink_embeddings(folder: Path) -> None:
    edit("config.json", vocab_size=1000)(folder)
    table = "embeddings.word_embeddings.weight"
    edit_weights(lambda all: {**all, table: all[table][:1000].clone()})(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (delete_files("tokenizer*"), "has no tokenizer"),
        (delete_files("tokenizer.json"), "has no tokenizer"),
        (write("tokenizer.json", "{"), "tokenizer.json: not valid JSON"),
        (write("tokenizer.json", "[]"), "tokenizer.json: input should be a valid dictionary"),
        (write("tokenizer.json", b"\xff\xfe"), "tokenizer.json: not valid JSON"),
        (write("tokenizer.json", '{"version": "1.0"}'), "cannot be loaded"),
        (write("tokenizer_config.json", "{"), "tokenizer_config.json: not valid JSON"),
        (shrink_vocabulary, "its vocabulary is missing or damaged"),
        (write("modules.json", "no"), "modules.json: not valid JSON"),
        (write("modules.json", '{"a": 1}'), "modules.json: input should be a valid list"),
        (write("modules.json", "[1]"), "modules.json: 0: input should be a valid dictionary"),
        (write("modules.json", "[{}]"), "has a None module"),
        (write("1_Pooling/config.json", "[]"), "1_Pooling/config.json: input should be"),
        (edit("1_Pooling/config.json", word_embedding_dimension=64), "width 64, but its transformer has 32"),
        (write(SETTINGS_FILE, '{"max_seq_length": "abc"}'), "max_seq_length = 'abc' is not a valid length"),
        (write(SETTINGS_FILE, '{"max_seq_length": -3}'), "max_seq_length = -3 is not a valid length"),
        (write(SETTINGS_FILE, '{"max_seq_length": 600}'), "max_length = 600, but the model reads at most 512 tokens"),
        (truncate_weights, "model.safetensors: damaged or truncated"),
        (write(WEIGHTS, b""), "model.safetensors: damaged or truncated"),
        (delete_files(WEIGHTS), "found none"),
        (pickle_weights, "found only pickled weights .pytorch_model.bin., which can run code"),
        (write("config.json", "{"), "config.json: not valid JSON"),
        (write("config.json", "{}"), "cannot be loaded"),
        (delete_files("config.json"), "has no config.json"),
        (edit("config.json", hidden_size=64), r"is \(.*\), expected \("),
        (edit("config.json", num_attention_heads=7), "cannot be loaded"),
        (edit("config.json", model_type="gpt2"), "its weights lack"),
        (edit("config.json", model_type="mine", auto_map={"AutoModel": "code.Model", "AutoConfig": "code.Config"}),
         "contains custom code"),
        (edit_weights(lambda all: {key: value for key, value in all.items() if "layer.1" not in key}),
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
        (edit_weights(lambda all: {f"other.{key}": value for key, value in all.items()}), "its weights lack 37 of 37"),
        (edit_weights(lambda all: {"other": torch.zeros(2)}), "but no dimension of the weights has this size"),
        (edit_weights(lambda all: {key: value * torch.nan for key, value in all.items()}), "are not finite"),
        (edit_weights(lambda all: {key: torch.zeros_like(value) for key, value in all.items()}), "the same vector"),
        (shrink_embeddings, "has a token 30521, but the encoder embeds only 1000"),
    ],
)  # fmt: skip
def test_unusable_encoder_is_refused_with_one_line_error(
    damage: Callable[[Path], object], message: str, saved_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("prompted on the terminal"))
    folder = tmp_path / "encoder"
    shutil.copytree(saved_encoder, folder)
    damage(folder)
    with pytest.raises(RamenError, match=message) as caught:
        load_encoder(folder, SETTINGS)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"encoder '{folder}': ")


def test_loading_changes_neither_modes_nor_random_state(saved_encoder: Path) -> None:
    load_encoder(saved_encoder, SETTINGS)  # lazy imports of the first load
    torch.manual_seed(3)
    encoder = load_encoder(saved_encoder, SETTINGS)
    first_numbers = torch.rand(3)
    torch.manual_seed(3)
    second = load_encoder(saved_encoder, SETTINGS)
    assert torch.equal(first_numbers, torch.rand(3))
    assert encoder.training and not encoder.transformer.training
    assert second.training
