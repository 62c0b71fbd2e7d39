"""Sizes of the checkpoint that the engine's tests serve."""

VOCAB_SIZE = 384
MAX_MODEL_LEN = 320  # tokens
EOS_TOKEN_IDS = tuple(range(100, 124))  # many, so that sampling at high temperature soon ends
