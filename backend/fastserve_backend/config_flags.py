"""Command-line flags made from the configuration: names, help and choices come from its fields."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from fastserve_backend.config import EngineConfig


def config_flags(*only: str) -> dict[str, tuple[Any, Any]]:
    """Annotation and default of a flag for each configuration key but the model, or for some."""
    parameters: dict[str, tuple[Any, Any]] = {}
    for section, section_field in EngineConfig.model_fields.items():
        fields: Mapping[str, FieldInfo] = section_field.annotation.model_fields  # type: ignore[union-attr]
        for key, field in fields.items():
            if key == "model" or (only and key not in only):  # the model is positional
                continue
            default = field.get_default()
            option = typer.Option(
                help=f"{field.description}{'' if default is None else f' Default: {default}.'}",
                metavar=_choices(field.annotation),
                rich_help_panel=f"engine.yaml: {section}",
                show_default=False,
            )
            parameters[key] = (Annotated[_flag_type(field.annotation) | None, option], None)
    return parameters


def register(
    app: typer.Typer, name: str, function: Any, parameters: dict[str, tuple[Any, Any]]
) -> None:
    """Add ``function``, which takes ``parameters`` as keywords, as a command."""
    function.__signature__ = inspect.Signature(
        [
            inspect.Parameter(
                key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            for key, (annotation, default) in parameters.items()
        ]
    )
    function.__annotations__ = {key: annotation for key, (annotation, _) in parameters.items()}
    app.command(name)(function)


def _flag_type(annotation: Any) -> Any:
    """The type that the command line parses; ``auto`` beside a number is parsed as text."""
    kinds = _members(annotation)
    for kind in (str, float, int):
        if all(isinstance(member, kind) or member is kind for member in kinds):
            return kind
    return str


def _choices(annotation: Any) -> str | None:
    if annotation is bool:
        return "true|false"
    literals = [str(member) for member in _members(annotation) if not isinstance(member, type)]
    types = [member.__name__ for member in _members(annotation) if isinstance(member, type)]
    return "|".join(types + literals) if literals else None


def _members(annotation: Any) -> list[Any]:
    """Types and literal values of a union, without None."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_args(annotation):
        members = [_members(part) for part in get_args(annotation) if part is not type(None)]
        return [member for part in members for member in part]
    return [annotation]
