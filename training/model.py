"""Implement BitNet b1.58 in torch: ternary weights with a straight-through estimator.

The computation is that of transformers' BitNetForCausalLM with squared ReLU (Ma et al., "The Era of
1-bit LLMs", 2024, and the 2B-4T report, 2025); parameters have the same names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Hold the sizes of the model; `hidden` and `ffn` are multiples of 256, as TQ2_0 requires."""

    n_vocab: int
    n_layer: int = 3
    n_head: int = 4
    hidden: int = 256
    ffn: int = 256
    rope_base: float = 500_000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Return the number of values of one head."""
        return self.hidden // self.n_head


def ternary(weight: Tensor) -> Tensor:
    """Round to {-1, 0, 1} times the mean magnitude; the gradient passes unchanged
    (straight-through).
    """
    scale = weight.detach().abs().mean().clamp(min=1e-5)
    rounded = (weight.detach() / scale).round().clamp(-1, 1) * scale
    return weight + (rounded - weight.detach())


class TernaryLinear(nn.Module):
    """Apply a linear layer without bias, whose weights are ternary in the forward pass."""

    def __init__(self, n_in: int, n_out: int) -> None:
        """Initialise the weights with variance 1 / n_in."""
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * n_in**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., n_in) to (..., n_out)."""
        return functional.linear(x, ternary(self.weight).to(x.dtype))


class Norm(nn.Module):
    """Apply RMSNorm."""

    def __init__(self, size: int, eps: float) -> None:
        """Initialise the gain with 1."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., size); shape and type stay the same."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


class Layer(nn.Module):
    """Apply attention with a norm before its output projection, then a gated FFN with such
    a norm.
    """

    def __init__(self, shape: Shape) -> None:
        """Initialise the weights randomly."""
        super().__init__()
        self.shape = shape
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.q_proj = TernaryLinear(shape.hidden, shape.hidden)
        self.k_proj = TernaryLinear(shape.hidden, shape.hidden)
        self.v_proj = TernaryLinear(shape.hidden, shape.hidden)
        self.attn_sub_norm = Norm(shape.hidden, shape.eps)
        self.o_proj = TernaryLinear(shape.hidden, shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.gate_proj = TernaryLinear(shape.hidden, shape.ffn)
        self.up_proj = TernaryLinear(shape.hidden, shape.ffn)
        self.ffn_sub_norm = Norm(shape.ffn, shape.eps)
        self.down_proj = TernaryLinear(shape.ffn, shape.hidden)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Map (batch, tokens, hidden) to the same shape."""
        x = x + self._attention(self.input_layernorm(x), rotation)
        y = self.post_attention_layernorm(x)
        y = functional.relu(self.gate_proj(y)).square() * self.up_proj(y)
        return x + self.down_proj(self.ffn_sub_norm(y))

    def _attention(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, tokens, hidden = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, tokens, self.shape.n_head, -1).transpose(1, 2)

        q, k = (_rotate(heads(p(x)), *rotation) for p in (self.q_proj, self.k_proj))
        y = _attend(q, k, heads(self.v_proj(x)))
        y = y.transpose(1, 2).reshape(batch, tokens, hidden)
        return self.o_proj(self.attn_sub_norm(y))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention by separate operations, which train faster on a CPU than the fused
    one.
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    n = q.shape[2]
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -1e4).softmax(-1) @ v


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE in the NEOX order: value i is rotated together with value i + half."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class BitNet(nn.Module):
    """Define the whole model; the embedding is also the output head."""

    def __init__(self, shape: Shape) -> None:
        """Initialise the weights randomly."""
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.n_vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layer))
        self.norm = Norm(shape.hidden, shape.eps)
        nn.init.normal_(self.embed_tokens.weight)
        nn.init.constant_(self.norm.weight, 0.06)

    def rotation(self, n_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, (tokens, head_dim / 2)."""
        dim = self.shape.head_dim
        frequency = self.shape.rope_base ** (-torch.arange(0, dim, 2) / dim)
        angle = torch.arange(n_tokens)[:, None] * frequency
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def hidden(self, tokens: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Map (batch, tokens) to (batch, tokens, hidden), the output of the last norm."""
        x = self.embed_tokens(tokens).to(dtype)
        rotation = self.rotation(tokens.shape[1], dtype)
        for layer in self.layers:
            x = layer(x, rotation)
        normed: Tensor = self.norm(x)
        return normed

    def head(self, hidden: Tensor) -> Tensor:
        """Map (..., hidden) to logits, (..., n_vocab)."""
        return functional.linear(hidden, self.embed_tokens.weight.to(hidden.dtype)).float()


@torch.no_grad()
def place_induction(model: BitNet) -> None:
    """Initialise the circuit that recall needs, instead of waiting until training finds it.

    Head h of layer 0 attends to the word h + 1 places back. Every head of layer 1 compares the
    words before a question's answer with the words before each earlier place, and copies the word
    at that place (Olsson et al., "In-context Learning and Induction Heads", 2022). Training then
    continues with all weights.
    """
    shape = model.shape
    dim, half = shape.head_dim, shape.head_dim // 2
    first, second = model.layers[0], model.layers[1]
    # Thirty-two values are the same for every word, so that places can be compared without noise.
    steady_values = slice(0, 32)
    constant = torch.zeros(shape.hidden)
    constant[steady_values] = torch.randn(32).sign()
    model.embed_tokens.weight[:, steady_values] = constant[steady_values]
    model.embed_tokens.weight /= model.embed_tokens.weight.square().mean(1, keepdim=True).sqrt()
    first.input_layernorm.weight[steady_values] = 8.0
    for layer in model.layers:
        layer.ffn_sub_norm.weight.fill_(0.1)

    angle = torch.arange(1, shape.n_head + 1)[:, None] * (
        shape.rope_base ** (-torch.arange(half) / half)
    )  # These angles rotate the pairs by the distance of each head.
    # Only the fast pairs are used, because slow ones cannot tell neighbours apart.
    fast = (torch.arange(half) < 8).expand_as(angle)
    query = torch.cat((fast * angle.cos(), -(fast * angle.sin())), dim=1).flatten()
    key = torch.cat((fast.float(), torch.zeros_like(angle)), dim=1).flatten()
    # A ternary row approximates a cosine by the number of its weights that are not zero.
    dense = torch.rand(shape.hidden, shape.hidden) < query[:, None].abs()
    first.q_proj.weight.copy_(2.0 * query.sign()[:, None] * dense * constant)
    first.k_proj.weight.copy_(2.0 * key[:, None] * constant)

    code = torch.randn(dim, shape.hidden) * shape.hidden**-0.5
    code[:, steady_values] = 0.0
    first.v_proj.weight.copy_(code.repeat(shape.n_head, 1))
    read = [code, *(part.T for part in first.o_proj.weight.split(dim, dim=1))]
    # Pairs whose angle makes a full turn within the context cannot compare words at any distance.
    steady = torch.arange(half) >= half // 2 - 2
    gain = torch.where(torch.cat((steady, steady)), 1.0, 0.2)[:, None]
    for head in range(shape.n_head):
        rows = slice(head * dim, (head + 1) * dim)
        bind = [torch.linalg.qr(torch.randn(dim, dim))[0] for _ in range(shape.n_head)]
        share = [1.0 if back == head else 0.3 for back in range(shape.n_head)]
        pairs = list(zip(bind, share, strict=True))
        q = sum(s * b @ r for (b, s), r in zip(pairs, read[:-1], strict=True))
        k = sum(s * b @ r for (b, s), r in zip(pairs, read[1:], strict=True))
        second.q_proj.weight[rows] = 3 * gain * q
        second.k_proj.weight[rows] = 3 * gain * k
    second.o_proj.weight.copy_(second.v_proj.weight.T)
