"""The CPU kernels for attention, linear layers and dropout, compared with torch and transformers."""

from __future__ import annotations

import copy

import pytest
import torch

from ramen.encoder.cpu import ATTENTION, Linear, RandomBytes, dropout_factors, use_cpu_kernels


def make_model(kind: str, dropout: float = 0.0) -> torch.nn.Module:
    from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel, RobertaConfig, RobertaModel

    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    size |= {"vocab_size": 100, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if kind == "distilbert":
        rates = {"dropout": dropout, "attention_dropout": dropout, "attn_implementation": "eager"}
        return DistilBertModel(DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=100, **rates))
    if kind == "roberta":
        return RobertaModel(RobertaConfig(pad_token_id=1, attn_implementation="eager", **size), add_pooling_layer=False)
    return BertModel(BertConfig(attn_implementation="eager", **size), add_pooling_layer=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta"])
def test_cpu_kernels_give_same_vectors_and_gradients(kind: str) -> None:
    plain = make_model(kind).train()
    replaced = copy.deepcopy(plain)
    use_cpu_kernels(replaced)
    assert replaced.config._attn_implementation == ATTENTION and plain.config._attn_implementation == "eager"
    ids = torch.randint(5, 100, (6, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([9, 3, 5, 9, 1, 7])[:, None]).long()
    results = []
    for network in (plain, replaced):
        hidden = network(input_ids=ids, attention_mask=mask).last_hidden_state * mask[:, :, None]
        hidden.pow(3).sum().backward()
        results.append((hidden.detach(), {name: p.grad for name, p in network.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-5)
    for name, gradient in results[0][1].items():
        if gradient is not None:
            torch.testing.assert_close(
                results[1][1][name], gradient, atol=1e-3, rtol=1e-4, msg=lambda m, n=name: f"{n} {m}"
            )


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 64), (64, 32), (48, 48)])
def test_linear_layer_in_bf16_has_gradients_of_torch(inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    reference = torch.nn.Linear(inputs, outputs, dtype=torch.bfloat16)
    ours = copy.deepcopy(reference)
    ours.__class__ = Linear
    x = torch.randn(3, 50, inputs, dtype=torch.bfloat16)
    results = []
    for layer in (reference, ours):
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append((out.detach(), leaf.grad, layer.weight.grad, layer.bias.grad))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_factors_have_rate_mean_and_seed(dtype: torch.dtype, rate: float) -> None:
    source = RandomBytes()
    samples = []
    for seed in (3, 3, 4):
        source.seed(seed)
        samples.append(dropout_factors(torch.Size((400, 501)), rate, dtype, source))
    assert torch.equal(samples[0], samples[1]) and not torch.equal(samples[0], samples[2])
    assert not torch.equal(samples[2], dropout_factors(torch.Size((400, 501)), rate, dtype, source)), (
        "the stream continues"
    )
    assert (samples[0] == 0).float().mean().item() == pytest.approx(rate, abs=0.005)
    assert samples[0].float().mean().item() == pytest.approx(1.0, abs=0.01)
    assert len(samples[0].unique()) == 2


def test_dropout_is_active_only_in_training_and_masks_its_gradient() -> None:
    network = make_model("bert", dropout=0.4)
    source = use_cpu_kernels(network)
    ids = torch.arange(5, 25).view(2, 10)
    network.eval()
    assert torch.equal(network(input_ids=ids).last_hidden_state, network(input_ids=ids).last_hidden_state)
    network.train()
    hidden = []
    for seed in (1, 1, 2):
        source.seed(seed)
        hidden.append(network(input_ids=ids).last_hidden_state)
    assert torch.equal(hidden[0], hidden[1]) and not torch.equal(hidden[0], hidden[2])
    layer = next(m for m in network.modules() if type(m).__name__ == "Dropout")
    x = torch.ones(1000, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach()) and (out == 0).any()


def test_model_with_custom_attention_dropout_keeps_its_attention() -> None:
    from transformers import ModernBertConfig, ModernBertModel

    config = ModernBertConfig(
        vocab_size=100, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        attention_dropout=0.5, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    network = ModernBertModel(config).train()
    use_cpu_kernels(network)
    network(input_ids=torch.tensor([[1, 5, 9, 2]])).last_hidden_state.sum().backward()
    assert network.config._attn_implementation != ATTENTION
