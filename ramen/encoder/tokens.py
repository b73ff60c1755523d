"""Token store: each distinct text is tokenised once and stored in one flat array.

Documents, labels and anchors often share texts (a Debian package can be all three). Texts are therefore numbered
globally, and a role (documents, labels, an anchor set) is an array of text numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramen.encoder.packing import Pack, packs

BATCH = 8192
"""Texts tokenised at a time."""

PADDING_SLACK = 1.4
"""Maximum ratio of the longest to the shortest text of a bucket (plus two tokens)."""


@dataclass(frozen=True)
class TokenStore:
    """Tokens of T distinct texts.

    Attributes:
        ids: int32 [tokens], concatenated texts with special tokens, each truncated to the encoder's max_length.
        offsets: int64 [T + 1]; text i is `ids[offsets[i]:offsets[i + 1]]`.
        pad_id: padding token.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    pad_id: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of every text, int64 [T]."""
        return np.diff(self.offsets)

    def lengths_of(self, texts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of some texts, int64 [n]."""
        return self.offsets[texts + 1] - self.offsets[texts]

    @classmethod
    def build(cls, tokenizer: Any, texts: Sequence[str], max_length: int) -> TokenStore:
        """Tokenise `texts` with a fast Hugging Face tokenizer."""
        parts: list[NDArray[np.int32]] = []
        lengths = np.zeros(len(texts) + 1, np.int64)
        for start in range(0, len(texts), BATCH):
            batch = tokenizer(
                list(texts[start : start + BATCH]),
                truncation=True,
                max_length=max_length,
                padding=False,
                return_attention_mask=False,
                return_token_type_ids=False,
            )["input_ids"]
            lengths[start + 1 : start + 1 + len(batch)] = [len(ids) for ids in batch]
            parts.append(np.fromiter((token for ids in batch for token in ids), np.int32))
        ids = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return cls(ids, np.cumsum(lengths), int(tokenizer.pad_token_id or 0))

    def packs(self, texts: NDArray[np.int64], budget: int) -> Iterator[tuple[NDArray[np.int64], Pack]]:
        """Split texts into packs with several texts per row.

        Args:
            texts: int64 [n] text numbers.
            budget: maximum tokens per pack, including padding (a single row is always allowed).

        Yields:
            Positions int64 [p] in `texts` and a `Pack`; every position exactly once.
        """
        return packs(self.ids, self.offsets[texts], self.lengths_of(texts), self.pad_id, budget)

    def buckets(self, texts: NDArray[np.int64], budget: int) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Split texts into padded batches of similar length.

        Args:
            texts: int64 [n] text numbers.
            budget: maximum tokens per batch, including padding (a single text is always allowed).

        Yields:
            Positions int64 [b] in `texts` and a `Batch`, shortest texts first; every position exactly once.
        """
        lengths = self.lengths_of(texts)
        order = np.argsort(lengths, kind="stable")
        ordered = lengths[order]
        start = 0
        while start < len(order):
            longest = int(ordered[start] * PADDING_SLACK) + 2
            stop = int(np.searchsorted(ordered, longest, side="right"))
            while stop - start > 1 and (stop - start) * ordered[stop - 1] > budget:
                stop = start + max(1, int(budget // ordered[stop - 1]))
            yield order[start:stop], self.batch(texts[order[start:stop]])
            start = stop

    def batch(self, texts: NDArray[np.int64]) -> Batch:
        """Pad texts to the longest of them."""
        lengths = self.lengths_of(texts)
        columns = np.arange(max(1, int(lengths.max(initial=1))))
        mask = columns[None, :] < lengths[:, None]
        ids = np.full(mask.shape, self.pad_id, np.int64)
        ids[mask] = self.ids[(self.offsets[texts][:, None] + columns)[mask]]
        return Batch(ids, mask)


@dataclass(frozen=True)
class Batch:
    """Padded tokens: `ids` int64 [b, t], `mask` bool [b, t], false for padding."""

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]


@dataclass(frozen=True)
class TextTable:
    """Distinct texts shared by several roles.

    Attributes:
        store: tokens of the distinct texts.
        roles: role -> int64 [items], text number of each item.
    """

    store: TokenStore
    roles: Mapping[str, NDArray[np.int64]]

    @classmethod
    def build(cls, tokenizer: Any, texts: Mapping[str, Sequence[str]], max_length: int) -> TextTable:
        """Number the distinct texts of all roles in order of first appearance, and tokenise each once."""
        numbers: dict[str, int] = {}
        roles = {
            role: np.fromiter((numbers.setdefault(text, len(numbers)) for text in items), np.int64, len(items))
            for role, items in texts.items()
        }
        return cls(TokenStore.build(tokenizer, list(numbers), max_length), roles)
