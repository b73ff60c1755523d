"""The sentence encoder: texts to unit vectors.

Wraps any Hugging Face encoder with mean or CLS pooling and L2 normalisation. A saved encoder can be loaded with
`sentence_transformers.SentenceTransformer(path)` and `transformers.AutoModel.from_pretrained(path)`.

Two techniques make it fast on short texts. Several texts share a row of tokens (see `packing`), so there is hardly any
padding. Where the hardware multiplies bf16 natively, the layers run in bf16 on copies of their float32 weights, made
once per step, instead of casting at every operation. The embedding tables stay in float32: their gradients are sums
over thousands of tokens, for which bf16 is too coarse.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from ramen.config import EncoderConfig
from ramen.encoder.cpu import RandomBytes
from ramen.encoder.packing import Pack
from ramen.encoder.tokens import Batch, TokenStore
from ramen.files import write_json

SETTINGS_FILE = "sentence_bert_config.json"
Pooling = Literal["mean", "cls"]
Weights = dict[str, Tensor]
"""Parameter name -> weights in the dtype that the layers compute in."""
P = ParamSpec("P")
R = TypeVar("R")

MASKED = -3e4
"""Added to attention scores between different texts: their softmax underflows to exactly 0, in bf16 too."""

EMBED_TOKENS = {"cpu": 2048, "cuda": 65_536}
"""Tokens encoded at a time without gradients, by device; on a CPU they fit into the caches."""
BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
"""CPU features that make bf16 products several times faster than float32 (Intel since 2021, AMD since Zen 4)."""


def _synchronized(
    method: Callable[Concatenate[SentenceEncoder, P], R],
) -> Callable[Concatenate[SentenceEncoder, P], R]:
    """Make a method of an encoder hold the encoder's lock."""

    @wraps(method)
    def locked(self: SentenceEncoder, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(Callable[Concatenate["SentenceEncoder", P], R], locked)


class SentenceEncoder(nn.Module):
    """A transformer with masked pooling and normalisation.

    Thread-safe: a lock lets one thread compute at a time, since threads share the mode (training or evaluation), the
    dtype of the layers and the tokenizer.

    Args:
        transformer: a Hugging Face encoder that returns `last_hidden_state`.
        tokenizer: the encoder's fast tokenizer.
        pooling: "mean" over tokens (without padding) or "cls".
        settings: section `encoder`.
    """

    def __init__(self, transformer: nn.Module, tokenizer: Any, pooling: Pooling, settings: EncoderConfig) -> None:
        super().__init__()
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.settings = settings
        self.dropout_stream: RandomBytes | None = None
        self._lock = threading.RLock()  # reentrant: `encode` calls `embed`, which calls `forward`
        self._dtype = torch.float32  # dtype of the embedding layer's output
        self._cached_weights: tuple[tuple[int, ...], Weights] | None = None
        embeddings = getattr(transformer, "embeddings", None)
        if isinstance(embeddings, nn.Module):
            embeddings.register_forward_hook(lambda module, inputs, output: output.to(self._dtype))

    @property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    @property
    def dimension(self) -> int:
        """Width D of the vectors."""
        return int(self.transformer.config.hidden_size)  # type: ignore[union-attr, arg-type]

    def seed(self, seed: int) -> None:
        """Seed the dropout of the following calls."""
        torch.manual_seed(seed)
        if self.dropout_stream is not None:
            self.dropout_stream.seed(seed)

    @_synchronized
    def forward(self, batch: Pack | Batch, weights: Weights | None = None) -> Tensor:
        """Encode one batch of `batches`.

        Args:
            batch: packed or padded texts.
            weights: result of `working_weights`; None = use the parameters.

        Returns:
            float32 [texts, D] in the batch's order, unit norm.
        """
        pooled = self._pool_packed(batch, weights) if isinstance(batch, Pack) else self._pool_padded(batch)
        return nn.functional.normalize(pooled, dim=-1)

    @_synchronized
    def batches(
        self, store: TokenStore, texts: NDArray[np.int64], budget: int
    ) -> list[tuple[NDArray[np.int64], Pack | Batch]]:
        """Split stored texts into batches of at most `budget` tokens: (positions int64 in `texts`, batch)."""
        return list(store.packs(texts, budget) if self.supports_packing else store.buckets(texts, budget))

    @_synchronized
    def working_weights(self) -> Weights | None:
        """Return bf16 copies of the layers' weights, connected to the parameters; None if the layers run in float32."""
        if not (self.supports_packing and use_bf16(self.settings.precision, self.device.type)):
            return None
        return {name: p.to(torch.bfloat16) for name, p in self._layers.items()}

    @_synchronized
    def encode_rows(self, store: TokenStore, texts: NDArray[np.int64]) -> Tensor:
        """Encode stored texts, with gradients if they are enabled.

        Args:
            store: tokens from this encoder's tokenizer.
            texts: int64 [n] text numbers; repeated numbers are encoded repeatedly.

        Returns:
            float32 [n, D] in the order of `texts`, on the encoder's device.
        """
        batches = self.batches(store, texts, self.settings.tokens_per_chunk)
        return self._encode_batches(batches, self.working_weights())

    @_synchronized
    def embed(self, store: TokenStore, texts: NDArray[np.int64], block: int = 16_384) -> NDArray[np.float32]:
        """Encode stored texts in evaluation mode, without gradients and with bounded memory.

        Returns:
            float32 [n, D], unit norm, in the order of `texts`.
        """
        out = np.empty((len(texts), self.dimension), np.float32)
        was_training = self.training
        self.eval()
        try:
            with torch.inference_mode():
                weights = self._inference_weights()
                for start in range(0, len(texts), block):
                    part = slice(start, start + block)
                    batches = self.batches(store, texts[part], EMBED_TOKENS[self.device.type])
                    out[part] = self._encode_batches(batches, weights).cpu().numpy()
        finally:
            self.train(was_training)
        return out

    @_synchronized
    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Encode texts: float32 [n, D], unit norm."""
        store = TokenStore.build(self.tokenizer, texts, self.settings.max_length)
        return self.embed(store, np.arange(len(texts), dtype=np.int64))

    @cached_property
    def supports_packing(self) -> bool:
        """Whether the transformer gives a text the same vector alone and packed with other texts.

        Determined by a trial with two short texts, since models differ in how they number positions and use masks.
        Always false for models with windowed attention: the packing mask would disable the window.
        """
        if getattr(self.transformer.config, "sliding_window", None) or not hasattr(self.transformer, "embeddings"):
            return False
        store = TokenStore(np.array([5, 6, 7, 8, 9], np.int32), np.array([0, 3, 5]), 0)
        texts = np.arange(2, dtype=np.int64)
        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                ((positions, pack),) = store.packs(texts, 1 << 10)
                ((order, batch),) = store.buckets(texts, 1 << 10)
                packed, padded = (
                    self._pool_packed(pack, None)[positions.argsort()],
                    self._pool_padded(batch, exact=True),
                )
            return torch.allclose(packed, padded[order.argsort()], atol=1e-4)
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
        finally:
            self.train(was_training)

    @cached_property
    def _layers(self) -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for name, parameter in self.transformer.named_parameters()
            if not name.startswith("embeddings.")
        }

    @cached_property
    def _first_position(self) -> int:
        """First position number: in RoBERTa and models derived from it, the padding index plus one; else 0."""
        embeddings = self.transformer.embeddings
        return embeddings.padding_idx + 1 if hasattr(embeddings, "create_position_ids_from_input_ids") else 0  # type: ignore[operator, union-attr, return-value]

    @_synchronized
    def train(self, mode: bool = True) -> SentenceEncoder:
        """Set the mode as `nn.Module.train` does.

        Training mode drops the weights cached for inference, since a fused optimiser changes parameters without
        incrementing their version.
        """
        if mode:
            self._cached_weights = None
        return super().train(mode)

    def _inference_weights(self) -> Weights | None:
        """Return `working_weights`, cached until the parameters change."""
        version = tuple(parameter._version for parameter in self._layers.values()) if self.supports_packing else ()
        if self._cached_weights is None or self._cached_weights[0] != version:
            self._cached_weights = (version, self.working_weights() or {})
        return self._cached_weights[1] or None

    def _encode_batches(self, batches: list[tuple[NDArray[np.int64], Pack | Batch]], weights: Weights | None) -> Tensor:
        """Encode batches and return the vectors in the original order of the texts."""
        if not batches:
            return torch.zeros(0, self.dimension, device=self.device)
        parts = torch.cat([self(batch, weights) for _, batch in batches])
        order = torch.from_numpy(np.argsort(np.concatenate([positions for positions, _ in batches])))
        return parts.index_select(0, order.to(self.device))

    def _pool_packed(self, pack: Pack, weights: Weights | None) -> Tensor:
        ids_nw, positions_nw, slots_nw, cells_k = (
            torch.from_numpy(array).to(self.device, non_blocking=True)
            for array in (pack.ids, pack.positions, pack.slots, pack.cells)
        )
        self._dtype = torch.float32 if weights is None else torch.bfloat16
        same_nww = slots_nw[:, :, None] == slots_nw[:, None, :]
        mask = torch.zeros(same_nww.shape, dtype=self._dtype, device=self.device).masked_fill_(~same_nww, MASKED)
        inputs = {
            "input_ids": ids_nw,
            "position_ids": positions_nw + self._first_position,
            "attention_mask": mask[:, None],
        }
        if weights is None:
            output = self.transformer(**inputs)
        else:
            output = functional_call(self.transformer, weights, (), inputs)
        hidden_nwd = output.last_hidden_state.float()
        share_nsw = (slots_nw[:, None, :] == torch.arange(pack.num_slots, device=self.device)[None, :, None]).float()
        if self.pooling == "cls":
            share_nsw = share_nsw * (positions_nw == 0)[:, None, :]
        share_nsw = share_nsw / share_nsw.sum(2, keepdim=True).clamp(min=1.0)
        return torch.bmm(share_nsw, hidden_nwd).flatten(0, 1).index_select(0, cells_k)

    def _pool_padded(self, batch: Batch, exact: bool = False) -> Tensor:
        ids, mask = (torch.from_numpy(array).to(self.device, non_blocking=True) for array in (batch.ids, batch.mask))
        kind = self.device.type
        self._dtype = torch.float32
        bf16 = not exact and use_bf16(self.settings.precision, kind)
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=bf16):
            hidden = self.transformer(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
        if self.pooling == "cls":
            return cast(Tensor, hidden[:, 0])
        weight = mask.unsqueeze(-1).float()
        return cast(Tensor, (hidden * weight).sum(1) / weight.sum(1).clamp(min=1.0))

    def save(self, folder: Path) -> None:
        """Write the weights (safetensors), the tokenizer and the module files of sentence-transformers."""
        folder.mkdir(parents=True, exist_ok=True)
        silence_transformers()
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
        settings: dict[str, Any] = {"max_seq_length": self.settings.max_length, "do_lower_case": False}
        if getattr(self.transformer, "pooler", self) is None:  # else loaders report that its weights are missing
            settings["model_args"] = {"add_pooling_layer": False}
        write_json(folder / SETTINGS_FILE, settings)


def use_bf16(precision: str, device_type: str) -> bool:
    """Return whether to compute in bf16; "auto" = if the hardware multiplies bf16 matrices natively."""
    if precision != "auto":
        return precision == "bf16"
    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in BF16_INSTRUCTIONS)


def silence_transformers() -> None:
    """Turn off the progress bars and load reports of transformers."""
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
