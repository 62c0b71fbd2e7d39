"""The error for a model's name, files or configuration."""

from fastserve_backend.errors import FastServeError


class ModelError(FastServeError):
    """A model cannot be served as asked. The message names the field or file, and the remedy."""
