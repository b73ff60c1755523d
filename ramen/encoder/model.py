"""The sentence encoder: text -> unit vectors.

Any Hugging Face encoder, with mean or CLS pooling and L2 normalisation. What `save` writes is loaded by
`sentence_transformers.SentenceTransformer(path)` and `transformers.AutoModel.from_pretrained(path)` alike.

Two things make it fast on short texts. Several texts share a row of tokens (see `packing`), so nearly nothing is
padding; and where bf16 pays, the layers run in bf16 throughout on copies of their float32 weights, made once per step,
instead of casting back and forth at every operation. The embedding tables stay float32: their gradients are sums over
thousands of tokens, which bf16 cannot add up.
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
"""Weights in the arithmetic of the layers, by parameter name."""
P = ParamSpec("P")
R = TypeVar("R")

MASKED = -3e4
"""Added to the attention scores of other texts: their share underflows to exactly 0, in bf16 too."""

EMBED_TOKENS = {"cpu": 2048, "cuda": 65_536}
"""Tokens encoded at a time without gradients: on a CPU what stays in its caches."""
BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
"""CPU features with which bf16 products are several times as quick as float32 (Intel since 2021, AMD since Zen 4)."""


def _one_thread_at_a_time(
    method: Callable[Concatenate[SentenceEncoder, P], R],
) -> Callable[Concatenate[SentenceEncoder, P], R]:
    """Run a method of an encoder under the encoder's lock."""

    @wraps(method)
    def locked(self: SentenceEncoder, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(Callable[Concatenate["SentenceEncoder", P], R], locked)


class SentenceEncoder(nn.Module):
    """Transformer, masked pooling, unit norm.

    Several threads may encode with one encoder: a lock lets one of them compute at a time, since the mode (training or
    evaluation), the arithmetic of the layers and the tokenizer are shared.

    Args:
        transformer: a Hugging Face encoder that returns `last_hidden_state`.
        tokenizer: its fast tokenizer.
        pooling: "mean" over tokens (padding excluded) or "cls".
        settings: max_length, precision and chunk size.
    """

    def __init__(self, transformer: nn.Module, tokenizer: Any, pooling: Pooling, settings: EncoderConfig) -> None:
        super().__init__()
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.settings = settings
        self.random: RandomBytes | None = None
        self._lock = threading.RLock()  # reentrant: `encode` calls `embed`, which calls `forward`
        self._working = torch.float32  # of what the embedding layer hands on
        self._kept: tuple[tuple[int, ...], Weights] | None = None
        embeddings = getattr(transformer, "embeddings", None)
        if isinstance(embeddings, nn.Module):
            embeddings.register_forward_hook(lambda module, inputs, output: output.to(self._working))

    @property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    @property
    def dimension(self) -> int:
        """D, the width of the vectors."""
        return int(self.transformer.config.hidden_size)  # type: ignore[union-attr, arg-type]

    def seed(self, seed: int) -> None:
        """Make the dropout of what is encoded next a function of `seed`."""
        torch.manual_seed(seed)
        if self.random is not None:
            self.random.seed(seed)

    @_one_thread_at_a_time
    def forward(self, batch: Pack | Batch, weights: Weights | None = None) -> Tensor:
        """Encode a batch that `batches` made.

        Args:
            batch: packed texts, or padded ones.
            weights: from `working_weights`; None = the parameters as they are.

        Returns:
            float32 [texts, D] in the batch's order, unit norm.
        """
        pooled = self._packed(batch, weights) if isinstance(batch, Pack) else self._padded(batch)
        return nn.functional.normalize(pooled, dim=-1)

    @_one_thread_at_a_time
    def batches(
        self, store: TokenStore, texts: NDArray[np.int64], budget: int
    ) -> list[tuple[NDArray[np.int64], Pack | Batch]]:
        """Cut stored texts into batches of at most `budget` tokens: (places int64 among `texts`, batch)."""
        return list(store.packs(texts, budget) if self.packs else store.buckets(texts, budget))

    @_one_thread_at_a_time
    def working_weights(self) -> Weights | None:
        """The layers' weights in bf16, connected to the parameters; None where the parameters are used as they are."""
        if not (self.packs and use_bf16(self.settings.precision, self.device.type)):
            return None
        return {name: p.to(torch.bfloat16) for name, p in self._layers.items()}

    @_one_thread_at_a_time
    def encode_rows(self, store: TokenStore, texts: NDArray[np.int64]) -> Tensor:
        """Encode stored texts, in order, with gradients if they are enabled.

        Args:
            store: tokens made by this encoder's tokenizer.
            texts: int64 [n] text numbers; encode distinct ones.

        Returns:
            float32 [n, D] on the encoder's device.
        """
        batches = self.batches(store, texts, self.settings.tokens_per_chunk)
        return self._in_order(batches, self.working_weights())

    @_one_thread_at_a_time
    def embed(self, store: TokenStore, texts: NDArray[np.int64], block: int = 16_384) -> NDArray[np.float32]:
        """Encode stored texts for retrieval: evaluation mode, no gradients, bounded memory.

        Returns:
            float32 [n, D] unit-norm rows in the order of `texts`.
        """
        out = np.empty((len(texts), self.dimension), np.float32)
        was_training = self.training
        self.eval()
        try:
            with torch.inference_mode():
                weights = self._kept_weights()
                for start in range(0, len(texts), block):
                    part = slice(start, start + block)
                    batches = self.batches(store, texts[part], EMBED_TOKENS[self.device.type])
                    out[part] = self._in_order(batches, weights).cpu().numpy()
        finally:
            self.train(was_training)
        return out

    @_one_thread_at_a_time
    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Encode texts: float32 [n, D], unit norm. Several threads may call it at once."""
        store = TokenStore.build(self.tokenizer, texts, self.settings.max_length)
        return self.embed(store, np.arange(len(texts), dtype=np.int64))

    @cached_property
    def packs(self) -> bool:
        """Whether the transformer gives a text the same vectors alone and in a row with others.

        It is tried, on two short texts: models differ in how they number positions and take masks. A model whose
        attention has a window is left out, since a mask of our own would lift it.
        """
        if getattr(self.transformer.config, "sliding_window", None) or not hasattr(self.transformer, "embeddings"):
            return False
        store = TokenStore(np.array([5, 6, 7, 8, 9], np.int32), np.array([0, 3, 5]), 0)
        texts = np.arange(2, dtype=np.int64)
        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                ((places, pack),) = store.packs(texts, 1 << 10)
                ((order, batch),) = store.buckets(texts, 1 << 10)
                packed, padded = self._packed(pack, None)[places.argsort()], self._padded(batch, exact=True)
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
        """RoBERTa and its kin count positions from the padding token's number plus one."""
        embeddings = self.transformer.embeddings
        return embeddings.padding_idx + 1 if hasattr(embeddings, "create_position_ids_from_input_ids") else 0  # type: ignore[operator, union-attr, return-value]

    @_one_thread_at_a_time
    def train(self, mode: bool = True) -> SentenceEncoder:
        """As `nn.Module.train`; weights kept for inference are forgotten, since a fused optimiser changes parameters
        without raising their version."""
        if mode:
            self._kept = None
        return super().train(mode)

    def _kept_weights(self) -> Weights | None:
        """`working_weights` for inference, made again only after the parameters changed."""
        version = tuple(parameter._version for parameter in self._layers.values()) if self.packs else ()
        if self._kept is None or self._kept[0] != version:
            self._kept = (version, self.working_weights() or {})
        return self._kept[1] or None

    def _in_order(self, batches: list[tuple[NDArray[np.int64], Pack | Batch]], weights: Weights | None) -> Tensor:
        if not batches:
            return torch.zeros(0, self.dimension, device=self.device)
        parts = torch.cat([self(batch, weights) for _, batch in batches])
        back = torch.from_numpy(np.argsort(np.concatenate([places for places, _ in batches])))
        return parts.index_select(0, back.to(self.device))

    def _packed(self, pack: Pack, weights: Weights | None) -> Tensor:
        ids_nw, positions_nw, slots_nw, cells_k = (
            torch.from_numpy(array).to(self.device, non_blocking=True)
            for array in (pack.ids, pack.positions, pack.slots, pack.cells)
        )
        self._working = torch.float32 if weights is None else torch.bfloat16
        same_nww = slots_nw[:, :, None] == slots_nw[:, None, :]
        mask = torch.zeros(same_nww.shape, dtype=self._working, device=self.device).masked_fill_(~same_nww, MASKED)
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

    def _padded(self, batch: Batch, exact: bool = False) -> Tensor:
        ids, mask = (torch.from_numpy(array).to(self.device, non_blocking=True) for array in (batch.ids, batch.mask))
        kind = self.device.type
        self._working = torch.float32
        bf16 = not exact and use_bf16(self.settings.precision, kind)
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=bf16):
            hidden = self.transformer(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
        if self.pooling == "cls":
            return cast(Tensor, hidden[:, 0])
        weight = mask.unsqueeze(-1).float()
        return cast(Tensor, (hidden * weight).sum(1) / weight.sum(1).clamp(min=1.0))

    def save(self, folder: Path) -> None:
        """Write weights (safetensors), tokenizer, and the modules sentence-transformers reads."""
        folder.mkdir(parents=True, exist_ok=True)
        quiet()
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
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in BF16_INSTRUCTIONS)


def quiet() -> None:
    """Keep transformers' progress bars and load reports off the terminal."""
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
