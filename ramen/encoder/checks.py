"""Checks of an encoder before it is used: its files before they are loaded, then what the loaded encoder does.

transformers replaces missing weights by random ones and a missing tokenizer by an empty one, without an error.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ramen.errors import ArtifactError, RamenError, shown
from ramen.files import read_json

if TYPE_CHECKING:  # the files are checked without loading torch
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
"""JSON files of an encoder's folder that hold an object, where they are there."""
TOKENIZERS = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "spm.model",
)
"""Files of which an encoder's folder has at least one."""
PACKAGED = {"minilm": (384, 91_000_000), "tiny": (32, 0)}
"""Name of a packaged encoder -> width of its vectors, bytes of its weights."""
SIZES = {
    "hidden_size", "intermediate_size", "embedding_size", "vocab_size", "relative_attention_num_buckets", "dim",
    "hidden_dim", "d_model", "d_ff", "n_embd", "emb_dim",
}  # fmt: skip
"""Keys of config.json that size parameters: each value is a dimension of the weights."""
POSITIONS = "position_embeddings.weight"
"""How the name of a table of positions ends; rotary encoders have none, and any `max_position_embeddings`."""
LAYER = re.compile(r"(?:^|\.)layers?\.(\d{1,6})\.")
"""The number of a layer in the name of a parameter."""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
PROBES = ("the quick brown fox", "a web server for large files", "12 34 56", "наука и жизнь", "机器学习")
"""Texts that are encoded to try an encoder, next to some words of its own vocabulary."""
WORDS = 16
"""Words of the vocabulary that are tried."""
SAME = 1e-6
"""Cosine distance up to which two vectors count as equal; rounding gives a tenth of it."""


def refusal(name: object, what: str, remedy: str) -> RamenError:
    """Return the error about an encoder that cannot be used."""
    return RamenError(f"encoder {str(name)!r}: {what}; {remedy}")


def check_folder(folder: Path) -> None:
    """Check the files of an encoder's folder: JSON that can be read, a tokenizer, and weights that are not pickled.

    Raises:
        RamenError: a file is missing or damaged; the message names it.
    """
    from safetensors import safe_open

    if not (folder / "config.json").is_file():
        raise refusal(folder, "has no config.json", "give the folder of a transformers or sentence-transformers model")
    again = "copy it from the model again"
    try:
        for name in MAPPINGS:
            if (folder / name).exists():
                read_json(folder / name, dict[str, Any], remedy=again)
        if (folder / "modules.json").exists():
            read_json(folder / "modules.json", list[dict[str, Any]], remedy=again)
    except ArtifactError as error:
        raise RamenError(f"encoder {str(folder)!r}: {str(error).removeprefix(f'{folder}/')}") from None
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise refusal(folder, f"has no tokenizer ({', '.join(TOKENIZERS[:3])}, ...)", "copy its files from the model")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
        found = f"only pickled weights ({pickled[0]}), which can run code when they are loaded" if pickled else "none"
        raise refusal(
            folder,
            f"expected weights in model.safetensors, found {found}",
            "if you trust its source, load it with transformers and save it with save_pretrained",
        )
    shapes: dict[str, list[int]] = {}
    for file in weights:
        try:
            with safe_open(file, "np") as opened:
                shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        except Exception as error:  # classes of the safetensors library and of the system
            raise refusal(folder, f"{file.name}: damaged or truncated ({_line(error)})", again) from None
    _check_sizes(folder, shapes, again)


def _check_sizes(folder: Path, shapes: Mapping[str, Sequence[int]], remedy: str) -> None:
    """Refuse sizes in config.json that are not those of the weights: loading would allocate them first.

    Args:
        folder: of the encoder.
        shapes: parameter -> shape of its weights.
        remedy: what to do about it.

    Raises:
        RamenError: a size is no whole number, or the weights have another.
    """
    layers = max((int(match[1]) + 1 for match in map(LAYER.search, shapes) if match), default=0)
    sizes = {size for shape in shapes.values() for size in shape}
    tabled = {"max_position_embeddings"} if any(name.endswith(POSITIONS) for name in shapes) else set()
    for key, stated in read_json(folder / "config.json", dict[str, Any]).items():
        where, number = f"config.json: {key} = {shown(stated)}", type(stated) is int
        if key in ("num_hidden_layers", "n_layers") and layers and not (number and 1 <= stated <= layers):
            raise refusal(folder, f"{where}, but the weights have {layers} layers", remedy)
        if key in SIZES | tabled and not (number and stated in sizes):
            raise refusal(folder, f"{where}, but no dimension of the weights has this size", remedy)
        if key == "type_vocab_size" and not (number and 0 <= stated <= max(sizes, default=0)):
            raise refusal(folder, f"{where}, expected at most {max(sizes, default=0)}, the weights' largest", remedy)


def encoder_width(name: str) -> int:
    """Width of an encoder's vectors, if it is known before the encoder is loaded; else 0."""
    if name in PACKAGED:
        return PACKAGED[name][0]
    if not (Path(name) / "config.json").is_file():
        return 0
    width = read_json(Path(name) / "config.json", dict[str, Any]).get("hidden_size")
    return width if isinstance(width, int) and width > 0 else 0


def encoder_bytes(name: str) -> int:
    """Bytes of an encoder's weights, if they are known before the encoder is loaded; else 0."""
    if name in PACKAGED:
        return PACKAGED[name][1]
    return sum(file.stat().st_size for file in Path(name).glob("*.safetensors")) if Path(name).is_dir() else 0


def check_loaded(name: object, transformer: Any, missing: Any, mismatched: Any) -> None:
    """Refuse weights that leave parameters of the transformer as they were drawn at random.

    Args:
        name: the encoder, as the user named it.
        transformer: as loaded.
        missing, mismatched: names of parameters, as transformers reports them.

    Raises:
        RamenError: a parameter that is used has no weights of its shape.
    """
    if mismatched:
        found = mismatched[0] if isinstance(mismatched, list) else next(iter(mismatched))
        what, *shapes = found if isinstance(found, tuple) else (found,)
        sizes = f" is {tuple(shapes[0])}, expected {tuple(shapes[1])}" if len(shapes) == 2 else " has another shape"
        raise refusal(name, f"its weights do not fit its config.json: {what}{sizes}", "give another encoder")
    used = {key for key, _ in transformer.named_parameters() if "pooler" not in key.split(".")[0]}
    if lost := sorted(used & set(missing)):
        raise refusal(
            name,
            f"its weights lack {len(lost)} of {len(used)} parameters, among them {lost[0]}",
            "give a model that was saved whole",
        )


def check_encoder(encoder: SentenceEncoder, name: object) -> None:
    """Try an encoder on some texts: its tokens give the text back, and different texts get different vectors.

    It takes milliseconds, changes nothing, and draws no random numbers.

    Raises:
        RamenError: it cannot be used; the message says why.
    """
    modes = [(module, module.training) for module in encoder.modules()]
    try:
        _check_vectors(encoder, name, _check_tokenizer(encoder, name))
    except RamenError:
        raise
    except Exception as error:  # foreign models raise anything
        raise refusal(
            name, f"cannot encode a text ({type(error).__name__}: {_line(error)})", "give another encoder"
        ) from None
    finally:
        for module, mode in modes:
            module.training = mode


def _check_tokenizer(encoder: SentenceEncoder, name: object) -> list[str]:
    """Return texts that the tokenizer gives back. Raises RamenError if there are fewer than two."""
    tokenizer = encoder.tokenizer
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    rows = int(encoder.transformer.get_input_embeddings().num_embeddings)  # type: ignore[operator, union-attr]
    highest = max(vocabulary.values(), default=-1)
    if highest >= rows:
        raise refusal(
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
        raise refusal(
            name,
            f"its tokenizer gives back {len(known)} of {len(PROBES) + len(words)} texts: its vocabulary is missing or "
            "damaged",
            "copy the tokenizer's files from the model",
        )
    return list(known.values())


def _check_vectors(encoder: SentenceEncoder, name: object, texts: list[str]) -> None:
    """Raise RamenError unless the vectors of the texts are finite, of unit norm, and differ."""
    vectors = encoder.encode(texts)
    if not np.isfinite(vectors).all():
        remedy = "give another encoder; if it was trained here, train again with a lower training.lr"
        raise refusal(name, "gives vectors that are not finite", remedy)
    if np.abs(np.linalg.norm(vectors, axis=1) - 1).max() > 0.1 or (vectors @ vectors.T).min() > 1 - SAME:
        remedy = "give another encoder; if it was trained here, train again with a lower training.lr"
        raise refusal(name, "gives different texts the same vector", remedy)


def _letters(text: str) -> str:
    """A text as tokenizers may change it: without case, accents, spaces and punctuation."""
    return "".join(char for char in unicodedata.normalize("NFKD", text).casefold() if char.isalnum())


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
