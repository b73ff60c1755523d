"""Attention, linear layers and dropout that train faster on a CPU than those of torch.

Measured on MiniLM in bf16 with AMX (docs/lab/experiments.md): torch's plain attention copies queries, keys and values
again in its backward pass and applies scale and mask in separate passes; the matrix product of a weight's gradient is a
third slower in one of its two orientations; torch's dropout generates one number at a time on one core, which takes as
long as the rest of a step.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

ATTENTION = "ramen_cpu"
"""Name of the attention function in transformers' registry."""


class RandomBytes:
    """A fast, seeded stream of random bytes for dropout."""

    def __init__(self) -> None:
        self._generator = np.random.Generator(np.random.SFC64())

    def seed(self, seed: int) -> None:
        """Restart the stream with this seed."""
        self._generator = np.random.Generator(np.random.SFC64(seed))

    def take(self, shape: torch.Size) -> Tensor:
        """Return the next bytes as a uint8 tensor of this shape."""
        count = shape.numel()
        words = self._generator.integers(0, 2**64, -(-count // 8), dtype=np.uint64)
        return torch.from_numpy(words.view(np.uint8)[:count]).view(shape)


def dropout_factors(shape: torch.Size, rate: float, dtype: torch.dtype, source: RandomBytes) -> Tensor:
    """Return dropout factors: 0 with probability `rate` (in steps of 1/256), else the value that keeps the mean."""
    threshold = round(256 * rate)
    kept, scale = source.take(shape) >= threshold, 256 / (256 - threshold)
    if dtype != torch.bfloat16:
        return kept.to(dtype).mul_(scale)
    bits = int(
        torch.tensor(scale, dtype=dtype).view(torch.int16)
    )  # integer arithmetic costs a third of a conversion to bf16
    return kept.to(torch.int16).mul_(bits).view(dtype)


class Dropout(nn.Dropout):
    """`nn.Dropout` on a stream of random bytes."""

    source: RandomBytes

    def forward(self, x: Tensor) -> Tensor:
        """See `nn.Dropout`."""
        if not self.training or self.p == 0:
            return x
        return x * dropout_factors(x.shape, self.p, x.dtype, self.source)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad2, x2 = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        is_wide = weight.shape[0] >= weight.shape[1]
        dweight = grad2.T @ x2 if is_wide else (x2.T @ grad2).T.contiguous()
        return (grad2 @ weight).view_as(x), dweight, grad2.sum(0)


class Linear(nn.Linear):
    """`nn.Linear` that computes its weight's gradient in the faster orientation, in bf16 only, where it is faster."""

    def forward(self, x: Tensor) -> Tensor:
        """See `nn.Linear`."""
        if torch.is_grad_enabled() and self.bias is not None and self.weight.dtype == x.dtype == torch.bfloat16:
            return _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]
        return super().forward(x)


class _Attention(torch.autograd.Function):
    """Letters: n rows, h heads, w tokens per row, d width of a head."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, factors: Tensor | None
    ) -> Tensor:
        n, h, w, d = query.shape
        q, k, v = (x.reshape(n * h, w, d) for x in (query, key, value))
        scores = torch.bmm(q, k.transpose(1, 2)).view(n, h, w, w)
        scores = scores.mul_(scaling) if mask is None else torch.add(mask, scores, alpha=scaling)
        share = torch.softmax(scores, -1).view(n * h, w, w)
        dropped = share if factors is None else share * factors.view_as(share)
        ctx.save_for_backward(q, k, v, share, factors)
        ctx.scaling = scaling
        return torch.bmm(dropped, v).view(n, h, w, d).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, share, factors = ctx.saved_tensors
        n, w, h, d = grad.shape
        g = grad.transpose(1, 2).reshape(n * h, w, d)
        dropped = share if factors is None else share * factors.view_as(share)
        dv = torch.bmm(dropped.transpose(1, 2), g)
        dshare = torch.bmm(g, v.transpose(1, 2))
        if factors is not None:
            dshare.mul_(factors.view_as(dshare))
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
    """Attention in transformers' interface: inputs [n, h, w, d], additive mask [n, 1, w, w], output [n, w, h, d]."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    factors = None
    if dropout > 0:
        shape = torch.Size((*query.shape[:3], key.shape[2]))
        factors = dropout_factors(shape, dropout, query.dtype, module.dropout.source)  # type: ignore[union-attr, arg-type]
    return _Attention.apply(query, key, value, attention_mask, scaling, factors), None  # type: ignore[no-untyped-call]


def use_cpu_kernels(transformer: nn.Module) -> RandomBytes:
    """Replace attention, linear layers and dropout of a Hugging Face model where they fit; parameters are unchanged.

    Returns:
        The random stream of the model's dropout.
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
    attention_modules = _attention_modules(transformer)
    replaceable = bool(attention_modules) and all(
        isinstance(getattr(module, "dropout", None), Dropout) for module in attention_modules
    )
    if getattr(transformer, "_supports_attention_backend", False) and replaceable:
        AttentionInterface.register(ATTENTION, attention)
        AttentionMaskInterface.register(ATTENTION, eager_mask)
        config._attn_implementation = ATTENTION
    return source


def _attention_modules(transformer: nn.Module) -> list[nn.Module]:
    """Return the modules that call the attention function: those with an attribute `scaling`."""
    return [module for module in transformer.modules() if hasattr(module, "scaling")]
