"""Two tools that show how a model calls tools: a calculator and a clock.

They read nothing and change nothing, so a model may call them as it likes.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from datetime import datetime
from typing import Any

CALCULATOR, CLOCK = "calculator", "clock"
NO_TOOL = "no_tool"
"""Does nothing: the choice of a model that must choose a tool and needs none."""

_MOST_CHARS = 100
# Products of longer numbers could fill the memory, and nobody wants to read them.
_MOST_DIGITS = 60

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """The value of an expression of numbers, ``+ - * /`` and parentheses, or what is wrong."""
    if len(expression) > _MOST_CHARS:
        return f"error: the expression is longer than {_MOST_CHARS} characters"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return "error: must be numbers, + - * / and parentheses"
    if isinstance(value, float):
        return f"{value:.10g}"
    return str(value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result: int | float = value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            result = _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            result = _OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("no arithmetic")
    if abs(result) >= 10**_MOST_DIGITS:
        raise OverflowError
    return result


def tell_time() -> str:
    """The time and the date here, such as ``21:50, Friday, 27 November 2026``."""
    now = datetime.now()
    return f"{now:%H:%M}, {now:%A}, {now.day} {now:%B %Y}"


def run_demo_tool(name: str, arguments: str) -> str:
    """Runs a call. Never raises.

    Args:
        arguments: the JSON text that the model wrote.

    Returns:
        The text of a message of the role ``tool``.
    """
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        return "error: the arguments are no JSON object"
    if name == CALCULATOR:
        expression = str(values.get("expression", ""))
        value = calculate(expression)
        return value if value.startswith("error") else f"{expression} = {value}"
    if name == CLOCK:
        return tell_time()
    if name == NO_TOOL:
        return ""
    return f"error: there is no tool {name!r}"
