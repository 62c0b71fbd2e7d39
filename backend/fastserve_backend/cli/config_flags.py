"""Command-line flags from the configuration: its fields give names, help and choices."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from fastserve_backend.config import EngineConfig

_Command = TypeVar("_Command", bound=Callable[..., Any])


def with_config_flags(
    *, only: Container[str] | None = None, without: Container[str] = ()
) -> Callable[[_Command], _Command]:
    """Decorates a command: its ``**keys`` become a flag for each configuration key, or for some.

    Flags that are not given on the command line are None.
    """

    def decorate(command: Any) -> Any:
        declared = inspect.signature(command, eval_str=True).parameters.values()
        own = [parameter for parameter in declared if parameter.kind is not parameter.VAR_KEYWORD]
        flags = [
            _flag(section, key, field)
            for section, key, field in _fields()
            if key not in without and (only is None or key in only)
        ]
        command.__signature__ = inspect.Signature(own + flags)
        return command

    return decorate


def _fields() -> Iterator[tuple[str, str, FieldInfo]]:
    """Section, key and field of each flag."""
    for section, section_field in EngineConfig.model_fields.items():
        for key, field in section_field.annotation.model_fields.items():  # type: ignore[union-attr]
            if key != "model":  # which is positional
                yield section, key, field


def _flag(section: str, key: str, field: FieldInfo) -> inspect.Parameter:
    default = field.get_default()
    option = typer.Option(
        help=f"{field.description}{'' if default is None else f' Default: {default}.'}",
        metavar="|".join(field.examples) if field.examples else _choices(field.annotation),
        rich_help_panel=f"engine.yaml: {section}",
        show_default=False,
    )
    return inspect.Parameter(
        key,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[_flag_type(field.annotation) | None, option],
    )


def _flag_type(annotation: Any) -> Any:
    """The type that the command line parses. A number or ``auto`` is parsed as text."""
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
