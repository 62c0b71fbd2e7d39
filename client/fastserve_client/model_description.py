"""What a server says about its model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Facts that the clients of a model need before they send a conversation.

    Servers of another version may send further fields, which are ignored. A new field has a
    default.
    """

    max_model_len: int
    """Most tokens of a prompt and its answer together."""
    chat_template: str | None
    """The Jinja source; None: the model takes no conversations."""
    tool_template: str | None = None
    """The source that is used in its place for requests with tools; None: it is the same."""

    @property
    def template_with_tools(self) -> str:
        """The source for requests with tools; empty if the model takes no conversations."""
        return self.tool_template or self.chat_template or ""
