"""GPT-NeoX (Black et al. 2022) and Pythia: parallel residual, partly rotated heads.

Checkpoint names are those of `transformers.GPTNeoXForCausalLM` without "gpt_neox.".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from .gpt_neox_config import GPTNeoXConfig
from .layers import Attention, AttentionBatch, Embedding, LayerNorm, Linear, prefixed
from .lm_head import LMHead
from .rotary import RotaryEmbedding, rotate
from .weights import NamedTensors, Parameter

# Buffers that older checkpoints hold and that follow from the configuration.
_COMPUTED = (".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq")

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_new": partial(torch.nn.functional.gelu, approximate="tanh"),
    "gelu_fast": partial(torch.nn.functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.relu,
}


class GPTNeoXLayer:
    """One decoder layer; the residual sums are left to the model."""

    def __init__(
        self, config: GPTNeoXConfig, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        hidden, ffn, heads = config.hidden_size, config.intermediate_size, config.num_heads
        linear = partial(Linear, dtype=dtype, device=device)
        norm = partial(
            LayerNorm, hidden, affine=True, dtype=dtype, device=device, eps=config.layer_norm_eps
        )
        self._heads, self._head_dim = heads, config.head_dim
        self._qkv = linear(hidden, {"query_key_value": 3 * hidden}, bias=config.attention_bias)
        self._attend = Attention(layer, heads, heads, config.head_dim, config.head_dim**-0.5)
        self._out = linear(hidden, {"dense": hidden}, bias=config.attention_bias)
        self._up = linear(hidden, {"dense_h_to_4h": ffn}, bias=True)
        self._activation = _ACTIVATIONS[config.activation]
        self._down = linear(ffn, {"dense_4h_to_h": hidden}, bias=True)
        self.attention_norm = norm()
        self.feed_forward_norm = norm()

    def parameters(self) -> dict[str, Parameter]:
        qkv = {name: self._by_part(one) for name, one in self._qkv.parameters().items()}
        return {
            **prefixed("attention", {**qkv, **self._out.parameters()}),
            **prefixed("mlp", {**self._up.parameters(), **self._down.parameters()}),
            **prefixed("input_layernorm", self.attention_norm.parameters()),
            **prefixed("post_attention_layernorm", self.feed_forward_norm.parameters()),
        }

    def _by_part(self, parameter: Parameter) -> Parameter:
        """The checkpoint has query, key and value of one head together; we have those of all."""

        def load(tensor: Tensor) -> None:
            by_head = tensor.view(self._heads, 3, self._head_dim, *tensor.shape[1:])
            parameter.load(by_head.transpose(0, 1).reshape(tensor.shape))

        return Parameter(parameter.shape, load)

    def attention(self, x: Tensor, cos_sin: Tensor, batch: AttentionBatch, kv: Tensor) -> Tensor:
        qkv = self._qkv(x)
        rotate(qkv, 2 * self._heads, self._head_dim, cos_sin)
        return self._out(self._attend(qkv, batch, kv))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self._down(self._activation(self._up(x)))


class GPTNeoXModel:
    """The decoder and its LM head. Load weights once, then call under `torch.inference_mode`."""

    def __init__(self, config: GPTNeoXConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._parallel = config.use_parallel_residual
        self._tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._rotary = RotaryEmbedding(config.rotary, config.max_model_len, device)
        self._layers = [GPTNeoXLayer(config, i, device, dtype) for i in range(config.num_layers)]
        self._final_norm = LayerNorm(
            config.hidden_size, affine=True, dtype=dtype, device=device, eps=config.layer_norm_eps
        )
        self._head = LMHead(
            "embed_out",
            config.hidden_size,
            config.vocab_size,
            tied_to=("embed_in.weight", self._tokens) if config.tie_word_embeddings else None,
            dtype=dtype,
            device=device,
        )

    def parameters(self) -> dict[str, Parameter]:
        """Every tensor that the model wants, by name; a tied LM head is none of them."""
        wanted = prefixed("embed_in", self._tokens.parameters())
        for index, layer in enumerate(self._layers):
            wanted |= prefixed(f"layers.{index}", layer.parameters())
        wanted |= prefixed("final_layer_norm", self._final_norm.parameters())
        return wanted | self._head.parameters()

    def load_weights(self, tensors: NamedTensors) -> None:
        """Take all weights. Raises ModelError for missing, unexpected or misshapen tensors."""
        self._head.load_model(self.parameters(), _canonical(tensors))

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, kv: Tensor
    ) -> Tensor:
        """Run the step's T tokens: token_ids and positions int64 [T] -> hidden states [T, hidden].

        Writes their keys and values to the cache `kv`, [blocks, layers, 2, kv_heads, block_size,
        head_dim].
        """
        cos_sin = self._rotary(positions)
        residual = self._tokens(token_ids)
        update = torch.zeros_like(residual)
        for layer in self._layers:
            residual, normed = layer.attention_norm(update, residual)
            attended = layer.attention(normed, cos_sin, batch, kv)
            if self._parallel:  # both sub-layers see the same input
                _, normed = layer.feed_forward_norm(torch.zeros_like(residual), residual)
                update = attended + layer.feed_forward(normed)
            else:
                residual, normed = layer.feed_forward_norm(attended, residual)
                update = layer.feed_forward(normed)
        return self._final_norm(update, residual)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden], rows of what `forward` returned -> logits [R, vocab]."""
        return self._head(hidden)


def _canonical(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if not name.endswith(_COMPUTED):
            yield name.removeprefix("gpt_neox."), tensor
