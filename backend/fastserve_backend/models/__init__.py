"""The models' forward passes and weights.

An architecture is a file, such as `llama`: its layers, on top of `rotary_lm` or `causal_lm`, built
of blocks from `layers` and `attention`.
"""
