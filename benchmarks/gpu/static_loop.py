"""What a hand-written loop does: OPT in plain torch, with a KV cache of one size for all jobs.

No job joins or leaves, nothing is paged, and no host work lies between two steps. So this is what
an engine's flexibility costs, and what a kernel of ours gains.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.opt_config import POSITION_OFFSET, OPTConfig
from torch import Tensor

SPREAD = 0.02  # of random weights


class StaticModel:
    """OPT's weights, random: its published sizes, with norms before their sub-layers."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        assert isinstance(config, OPTConfig)
        self.config = config
        hidden, ffn = config.hidden_size, config.intermediate_size

        def random(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(0, SPREAD)

        def linear(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            return random(rows, columns), random(rows)

        def norm() -> tuple[Tensor, Tensor]:
            return random(hidden), random(hidden)

        self.tokens = random(config.vocab_size, hidden)
        self.positions = random(config.max_position_embeddings + POSITION_OFFSET, hidden)
        self.layers = [
            {
                "attention_norm": norm(),
                "qkv": linear(3 * hidden, hidden),
                "out": linear(hidden, hidden),
                "feed_forward_norm": norm(),
                "fc1": linear(ffn, hidden),
                "fc2": linear(hidden, ffn),
            }
            for _ in range(config.num_layers)
        ]
        self.norm = norm()

    @property
    def num_parameters(self) -> int:
        tensors = [self.tokens, self.positions, *self.norm]
        tensors += [one for layer in self.layers for pair in layer.values() for one in pair]
        return sum(one.numel() for one in tensors)


class StaticLoop:
    """Steps of a batch whose jobs all attend to ``context`` tokens, the new one included.

    ``step`` always has the same shapes and addresses and can be captured in one graph. It writes
    its tokens where the next step reads them.
    """

    def __init__(self, model: StaticModel, batch: int, context: int) -> None:
        config, like = model.config, model.tokens
        self._model = model
        self._shape = batch, config.num_heads, config.head_dim
        self._last = context - 1
        shape = (config.num_layers, 2, batch, config.num_heads, context, config.head_dim)
        self._kv = torch.empty(shape, dtype=like.dtype, device=like.device)
        for layer in self._kv:  # one at a time, because the generator needs memory too
            layer.normal_()
        self._token_ids = torch.arange(batch, device=like.device)

    def step(self) -> Tensor:
        model, hidden = self._model, self._model.config.hidden_size
        x = model.tokens[self._token_ids] + model.positions[self._last + POSITION_OFFSET]
        for weights, (keys, values) in zip(model.layers, self._kv, strict=True):
            normed = F.layer_norm(x, (hidden,), *weights["attention_norm"])
            query, key, value = (
                F.linear(normed, *weights["qkv"]).view(-1, 3, *self._shape[1:]).unbind(1)
            )
            keys[:, :, self._last] = key
            values[:, :, self._last] = value
            attended = F.scaled_dot_product_attention(query[:, :, None], keys, values)
            x = x + F.linear(attended.reshape(-1, hidden), *weights["out"])
            normed = F.layer_norm(x, (hidden,), *weights["feed_forward_norm"])
            x = x + F.linear(F.linear(normed, *weights["fc1"]).relu(), *weights["fc2"])
        logits = F.linear(F.layer_norm(x, (hidden,), *model.norm), model.tokens)
        return self._token_ids.copy_(logits.argmax(-1))
