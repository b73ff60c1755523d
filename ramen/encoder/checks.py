"""Checks of an encoder before use: its files before loading, its vectors after loading.

transformers silently replaces missing weights by random ones and a missing tokenizer by an empty one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ramen.errors import ArtifactError, RamenError, short_repr
from ramen.files import read_json

if TYPE_CHECKING:  # checking files must not import torch
    from ramen.encoder.model import SentenceEncoder

MAPPINGS = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "model.safetensors.index.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
)
"""Optional JSON files of an encoder's folder; each holds an object."""
TOKENIZERS = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "spm.model",
)
"""Tokenizer files; an encoder's folder has at least one of them."""
PACKAGED = {"minilm": (384, 91_000_000), "tiny": (32, 0)}
"""Name of a packaged encoder -> vector width, bytes of its weights."""
SIZES = {
    "hidden_size", "intermediate_size", "embedding_size", "vocab_size", "relative_attention_num_buckets", "dim",
    "hidden_dim", "d_model", "d_ff", "n_embd", "emb_dim",
}  # fmt: skip
"""Keys of config.json that size parameters: each value is a dimension of the weights."""
POSITIONS = "position_embeddings.weight"
"""Suffix of the name of a position table; rotary encoders have none, so `max_position_embeddings` is unlimited."""
LAYER = re.compile(r"(?:^|\.)layers?\.(\d{1,6})\.")
"""Layer number in a parameter's name."""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
PROBES = ("the quick brown fox", "a web server for large files", "12 34 56", "наука и жизнь", "机器学习")
"""Texts that `check_encoder` encodes, together with words of the encoder's vocabulary."""
WORDS = 16
"""Number of vocabulary words that `check_encoder` encodes."""
EQUAL_DISTANCE = 1e-6
"""Two vectors within this cosine distance count as equal; rounding errors are a tenth of it."""


def encoder_error(name: object, what: str, remedy: str) -> RamenError:
    """Return the error for an unusable encoder."""
    return RamenError(f"encoder {str(name)!r}: {what}; {remedy}")


def check_folder(folder: Path) -> None:
    """Check that an encoder's folder has valid JSON, a tokenizer and weights that are not pickled.

    Raises:
        RamenError: a file is missing or damaged.
    """
    from safetensors import safe_open

    if not (folder / "config.json").is_file():
        raise encoder_error(
            folder, "has no config.json", "give the folder of a transformers or sentence-transformers model"
        )
    remedy = "copy it from the model again"
    try:
        for name in MAPPINGS:
            if (folder / name).exists():
                read_json(folder / name, dict[str, Any], remedy=remedy)
        if (folder / "modules.json").exists():
            read_json(folder / "modules.json", list[dict[str, Any]], remedy=remedy)
    except ArtifactError as error:
        raise RamenError(f"encoder {str(folder)!r}: {str(error).removeprefix(f'{folder}/')}") from None
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise encoder_error(
            folder, f"has no tokenizer ({', '.join(TOKENIZERS[:3])}, ...)", "copy its files from the model"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
        found = f"only pickled weights ({pickled[0]}), which can run code when loaded" if pickled else "none"
        raise encoder_error(
            folder,
            f"expected weights in model.safetensors, found {found}",
            "if you trust its source, load it with transformers and save it again with save_pretrained",
        )
    shapes: dict[str, list[int]] = {}
    for file in weights:
        try:
            with safe_open(file, "np") as opened:
                shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        except Exception as error:  # safetensors and the system raise different classes
            raise encoder_error(folder, f"{file.name}: damaged or truncated ({_first_line(error)})", remedy) from None
    _check_sizes(folder, shapes, remedy)


def _check_sizes(folder: Path, shapes: Mapping[str, Sequence[int]], remedy: str) -> None:
    """Check the sizes in config.json against the weights: loading allocates memory by them first.

    Args:
        folder: folder of the encoder.
        shapes: parameter name -> shape of its weights.
        remedy: what the user can do.

    Raises:
        RamenError: a size is no whole number, or differs from the weights.
    """
    layers = max((int(match[1]) + 1 for match in map(LAYER.search, shapes) if match), default=0)
    dimensions = {size for shape in shapes.values() for size in shape}
    has_positions = any(name.endswith(POSITIONS) for name in shapes)
    sizes = SIZES | {"max_position_embeddings"} if has_positions else SIZES
    largest = max(dimensions, default=0)
    for key, stated in read_json(folder / "config.json", dict[str, Any]).items():
        where, is_integer = f"config.json: {key} = {short_repr(stated)}", type(stated) is int
        if key in ("num_hidden_layers", "n_layers") and layers and not (is_integer and 1 <= stated <= layers):
            raise encoder_error(folder, f"{where}, but the weights have {layers} layers", remedy)
        if key in sizes and not (is_integer and stated in dimensions):
            raise encoder_error(folder, f"{where}, but no dimension of the weights has this size", remedy)
        if key == "type_vocab_size" and not (is_integer and 0 <= stated <= largest):
            raise encoder_error(
                folder, f"{where}, expected at most {largest}, the largest dimension of the weights", remedy
            )


def encoder_width(name: str) -> int:
    """Return the width of an encoder's vectors if it is known without loading the encoder, else 0."""
    if name in PACKAGED:
        return PACKAGED[name][0]
    if not (Path(name) / "config.json").is_file():
        return 0
    width = read_json(Path(name) / "config.json", dict[str, Any]).get("hidden_size")
    return width if isinstance(width, int) and width > 0 else 0


def encoder_bytes(name: str) -> int:
    """Return the bytes of an encoder's weights if they are known without loading the encoder, else 0."""
    if name in PACKAGED:
        return PACKAGED[name][1]
    return sum(file.stat().st_size for file in Path(name).glob("*.safetensors")) if Path(name).is_dir() else 0


def check_loaded(name: object, transformer: Any, missing: Any, mismatched: Any) -> None:
    """Check that every used parameter got its weights from the files and none is still random.

    Args:
        name: name of the encoder in error messages.
        transformer: the loaded model.
        missing, mismatched: names of parameters as transformers reports them.

    Raises:
        RamenError: a parameter has no weights, or weights of another shape.
    """
    if mismatched:
        entry = mismatched[0] if isinstance(mismatched, list) else next(iter(mismatched))
        parameter, *shapes = entry if isinstance(entry, tuple) else (entry,)
        sizes = f" is {tuple(shapes[0])}, expected {tuple(shapes[1])}" if len(shapes) == 2 else " has another shape"
        raise encoder_error(name, f"its weights do not fit its config.json: {parameter}{sizes}", "give another encoder")
    used = {key for key, _ in transformer.named_parameters() if "pooler" not in key.split(".")[0]}
    if lost := sorted(used & set(missing)):
        raise encoder_error(
            name,
            f"its weights lack {len(lost)} of {len(used)} parameters, among them {lost[0]}",
            "give a complete model",
        )


def check_encoder(encoder: SentenceEncoder, name: object) -> None:
    """Encode some texts: tokens must decode to the text, and different texts must get different vectors.

    Takes milliseconds; does not change the encoder's state or consume random numbers.

    Raises:
        RamenError: the encoder is unusable.
    """
    modes = [(module, module.training) for module in encoder.modules()]
    try:
        _check_vectors(encoder, name, _check_tokenizer(encoder, name))
    except RamenError:
        raise
    except Exception as error:  # third-party models raise any class
        raise encoder_error(
            name, f"cannot encode a text ({type(error).__name__}: {_first_line(error)})", "give another encoder"
        ) from None
    finally:
        for module, mode in modes:
            module.training = mode


def _check_tokenizer(encoder: SentenceEncoder, name: object) -> list[str]:
    """Return the texts that the tokenizer can reproduce. Raises RamenError if there are fewer than two."""
    tokenizer = encoder.tokenizer
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    rows = int(encoder.transformer.get_input_embeddings().num_embeddings)  # type: ignore[operator, union-attr]
    highest = max(vocabulary.values(), default=-1)
    if highest >= rows:
        raise encoder_error(
            name,
            f"its tokenizer has a token {highest}, but the encoder embeds only {rows}",
            "copy tokenizer and weights from the same model",
        )
    spread = np.unique(np.linspace(0, max(highest, 0), 16 * WORDS).astype(int)).tolist()
    special = set(tokenizer.all_special_ids)
    words = [text for i in spread if i not in special and _letters(text := tokenizer.decode([i]))]
    known: dict[tuple[int, ...], str] = {}
    for text in (*PROBES, *words[:: max(1, len(words) // WORDS)]):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if _letters(tokenizer.decode(ids, skip_special_tokens=True)) == _letters(text):
            known.setdefault(tuple(ids), text)
    if len(known) < 2:
        raise encoder_error(
            name,
            f"its tokenizer reproduces {len(known)} of {len(PROBES) + len(words)} texts: its vocabulary is missing or "
            "damaged",
            "copy the tokenizer's files from the model",
        )
    return list(known.values())


def _check_vectors(encoder: SentenceEncoder, name: object, texts: list[str]) -> None:
    """Check that the vectors of the texts are finite, have unit norm and differ."""
    vectors = encoder.encode(texts)
    remedy = "give another encoder; if ramen trained it, train again with a lower training.lr"
    if not np.isfinite(vectors).all():
        raise encoder_error(name, "gives vectors that are not finite", remedy)
    if np.abs(np.linalg.norm(vectors, axis=1) - 1).max() > 0.1 or (vectors @ vectors.T).min() > 1 - EQUAL_DISTANCE:
        raise encoder_error(name, "gives different texts the same vector", remedy)


def _letters(text: str) -> str:
    """Normalise a text as tokenizers may: no case, accents, spaces or punctuation."""
    return "".join(char for char in unicodedata.normalize("NFKD", text).casefold() if char.isalnum())


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
