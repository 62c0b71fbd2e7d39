"""The messages between the engine and its ranks, and what both sides must know. No torch."""
