"""Measurements that are made again and again: run from the root, ``python -m benchmarks.NAME``."""
