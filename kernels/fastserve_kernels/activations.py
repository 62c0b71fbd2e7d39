"""The functions between the two products of a feed-forward block."""

from __future__ import annotations

from typing import Literal, get_args

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
"""silu(x) = x · sigmoid(x); gelu(x) = x · Φ(x), and its tanh approximation (Hendrycks and Gimpel
2016); relu_squared(x) = relu(x)²."""
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
