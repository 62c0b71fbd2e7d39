"""Models: their configuration, weights, tokenizers and forward passes."""
