"""Which tokens an answer may go on with: a process of its own, and the engine's side of it."""
