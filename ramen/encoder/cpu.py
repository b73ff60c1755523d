"""What makes a transformer train quickly on a CPU: attention, linear layers and dropout of our own.

Measured on MiniLM in bf16 with AMX (docs/lab/experiments.md): plain attention copies queries, keys and values again in its
backward pass and has passes of their own for scale and mask; the product for a weight's gradient is a third slower in
one of two orientations; and torch's dropout draws one number at a time on one core, as long as the rest of a step.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

ATTENTION = "ramen_cpu"
"""Name under which the attention function is known to transformers."""


class RandomBytes:
    """A stream of random bytes for dropout, quick and keyed by a seed."""

    def __init__(self) -> None:
        self._generator = np.random.Generator(np.random.SFC64())

    def seed(self, seed: int) -> None:
        """Start the stream of this seed."""
        self._generator = np.random.Generator(np.random.SFC64(seed))

    def take(self, shape: torch.Size) -> Tensor:
        """uint8 tensor of this shape."""
        count = shape.numel()
        words = self._generator.integers(0, 2**64, -(-count // 8), dtype=np.uint64)
        return torch.from_numpy(words.view(np.uint8)[:count]).view(shape)


def factors(shape: torch.Size, rate: float, dtype: torch.dtype, source: RandomBytes) -> Tensor:
    """What dropout multiplies with: 0 for a share of `rate` (to 1/256), else what keeps the mean."""
    threshold = round(256 * rate)
    kept, scale = source.take(shape) >= threshold, 256 / (256 - threshold)
    if dtype != torch.bfloat16:
        return kept.to(dtype).mul_(scale)
    bits = int(torch.tensor(scale, dtype=dtype).view(torch.int16))  # integers turn into numbers at a third of the cost
    return kept.to(torch.int16).mul_(bits).view(dtype)


class Dropout(nn.Dropout):
    """`nn.Dropout` that draws bytes from a stream."""

    source: RandomBytes

    def forward(self, x: Tensor) -> Tensor:
        """As of `nn.Dropout`."""
        if not self.training or self.p == 0:
            return x
        return x * factors(x.shape, self.p, x.dtype, self.source)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad2, x2 = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        wide = weight.shape[0] >= weight.shape[1]
        dweight = grad2.T @ x2 if wide else (x2.T @ grad2).T.contiguous()
        return (grad2 @ weight).view_as(x), dweight, grad2.sum(0)


class Linear(nn.Linear):
    """`nn.Linear` with the quicker product for its weight's gradient, where that pays: in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        """As of `nn.Linear`."""
        if torch.is_grad_enabled() and self.bias is not None and self.weight.dtype == x.dtype == torch.bfloat16:
            return _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]
        return super().forward(x)


class _Attention(torch.autograd.Function):
    """Letters: n rows, h heads, w tokens, d width of a head."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, kept: Tensor | None
    ) -> Tensor:
        n, h, w, d = query.shape
        q, k, v = (x.reshape(n * h, w, d) for x in (query, key, value))
        scores = torch.bmm(q, k.transpose(1, 2)).view(n, h, w, w)
        scores = scores.mul_(scaling) if mask is None else torch.add(mask, scores, alpha=scaling)
        share = torch.softmax(scores, -1).view(n * h, w, w)
        used = share if kept is None else share * kept.view_as(share)
        ctx.save_for_backward(q, k, v, share, kept)
        ctx.scaling = scaling
        return torch.bmm(used, v).view(n, h, w, d).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, share, kept = ctx.saved_tensors
        n, w, h, d = grad.shape
        g = grad.transpose(1, 2).reshape(n * h, w, d)
        used = share if kept is None else share * kept.view_as(share)
        dv = torch.bmm(used.transpose(1, 2), g)
        dshare = torch.bmm(g, v.transpose(1, 2))
        if kept is not None:
            dshare.mul_(kept.view_as(dshare))
        dscores = torch._softmax_backward_data(dshare, share, -1, share.dtype)
        dq = torch.bmm(dscores, k).mul_(ctx.scaling)
        dk = torch.bmm(dscores.transpose(1, 2), q).mul_(ctx.scaling)
        return (*(x.view(n, h, w, d) for x in (dq, dk, dv)), None, None, None)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [n, h, w, d] each, additive mask [n, 1, w, w] -> [n, w, h, d]."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    kept = None
    if dropout > 0:
        shape = torch.Size((*query.shape[:3], key.shape[2]))
        kept = factors(shape, dropout, query.dtype, module.dropout.source)  # type: ignore[union-attr, arg-type]
    return _Attention.apply(query, key, value, attention_mask, scaling, kept), None  # type: ignore[no-untyped-call]


def use_cpu_kernels(transformer: nn.Module) -> RandomBytes:
    """Give a Hugging Face model on a CPU this module's parts where they fit; its parameters stay what they are.

    Returns:
        The stream of its dropout.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    source = RandomBytes()
    for module in transformer.modules():
        if type(module) is nn.Dropout:
            module.__class__ = Dropout
            cast(Dropout, module).source = source
        elif type(module) is nn.Linear:
            module.__class__ = Linear
    config: Any = transformer.config
    attending = _attending(transformer)
    ours = bool(attending) and all(isinstance(getattr(module, "dropout", None), Dropout) for module in attending)
    if getattr(transformer, "_supports_attention_backend", False) and ours:
        AttentionInterface.register(ATTENTION, attention)
        AttentionMaskInterface.register(ATTENTION, eager_mask)
        config._attn_implementation = ATTENTION
    return source


def _attending(transformer: nn.Module) -> list[nn.Module]:
    """The modules that call the attention function: they own a scaling."""
    return [module for module in transformer.modules() if hasattr(module, "scaling")]
