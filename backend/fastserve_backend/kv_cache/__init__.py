"""Decisions about KV memory: which block belongs to which job, and who must give blocks back."""
