"""The base of bodies and of their parts."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictFields(BaseModel):
    """Strict: "5" is not 5. Undeclared fields are kept, so that they can be named."""

    model_config = ConfigDict(strict=True, extra="allow")

    def unknown_fields(self) -> list[str]:
        """Fields that nothing here reads. A field that is null does not count."""
        return [name for name, value in (self.model_extra or {}).items() if value is not None]


class Body(StrictFields):
    """The body of a request."""

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return 1
