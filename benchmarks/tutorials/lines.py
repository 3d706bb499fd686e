"""How many lines of code a part of a program has; one rule for every program.

A line counts if it holds code: blank lines, comments, docstrings and `print` statements do not.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence

BLANK = {
    tokenize.ENCODING,
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def code_lines(source: str, names: Sequence[str]) -> int:
    """Lines of code of the named parts together.

    Args:
        names: each a function or class with its decorators ("train"), one inside another
            ("run.start"), or only the statement of it that holds a call ("learn:ps.start").
    Raises:
        LookupError: there is no such part, or more than one such statement.
    """
    tree = ast.parse(source)
    wanted = {line for name in names for line in _lines(_part(tree, name))}
    return len((wanted & _code(source)) - _left_out(tree))


def _code(source: str) -> set[int]:
    """Lines with any part of a token that is no comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        line
        for token in tokens
        if token.type not in BLANK
        for line in range(token.start[0], token.end[0] + 1)
    }


def _left_out(tree: ast.Module) -> set[int]:
    """Lines of docstrings and of `print(...)` or `something.print(...)`."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and _is_left_out(node.value)
        for line in _lines(node)
    }


def _is_left_out(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] == "print"
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _part(tree: ast.Module, name: str) -> ast.stmt:
    path, _, call = name.partition(":")
    found: ast.Module | ast.stmt = tree
    for each in path.split("."):
        found = _only(
            (
                node
                for node in ast.iter_child_nodes(found)
                if isinstance(node, DEFINITIONS) and node.name == each
            ),
            name,
        )
    assert isinstance(found, ast.stmt)
    return _only(_statements(found, call), name) if call else found


def _statements(node: ast.AST, call: str) -> Iterator[ast.stmt]:
    """The innermost statements that hold a call of this name."""
    for child in ast.walk(node):
        if isinstance(child, ast.stmt) and child is not node:
            inner = any(isinstance(one, ast.stmt) for one in list(ast.walk(child))[1:])
            calls = (one.func for one in ast.walk(child) if isinstance(one, ast.Call))
            if not inner and call in map(ast.unparse, calls):
                yield child


def _only(found: Iterator[ast.stmt], name: str) -> ast.stmt:
    nodes = list(found)
    if len(nodes) != 1:
        raise LookupError(f"expected {name} once, found it {len(nodes)} times")
    return nodes[0]


def _lines(node: ast.stmt) -> range:
    """Lines from the first decorator to the end."""
    decorators = node.decorator_list if isinstance(node, DEFINITIONS) else []
    first = min([node.lineno, *(one.lineno for one in decorators)])
    return range(first, (node.end_lineno or node.lineno) + 1)
