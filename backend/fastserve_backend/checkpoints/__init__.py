"""Models on disk: where they come from, their configuration, tokenizers and chat templates.

Nothing here imports torch.
"""
