"""A rank: one ``torch.distributed`` subprocess that runs the model.

Imports torch; the engine imports nothing of it but ``messages``, which is plain data.
"""
