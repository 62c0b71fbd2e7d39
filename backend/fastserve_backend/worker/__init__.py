"""A rank: one ``torch.distributed`` subprocess that runs the model.

Imports torch; the engine imports nothing of it but ``messages`` and ``cluster_keys``, which do not.
"""
