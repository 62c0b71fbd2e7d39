"""The latency profile: how long an iteration takes on this model and machine."""
