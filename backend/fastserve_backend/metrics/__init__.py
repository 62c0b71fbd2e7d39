"""What metrics are made of: the engine's counters and histograms."""
