"""Other text for one line of logic, and a draw of lines to change; see tests/mutants.py.

A change is another comparison, operator, constant, flag or branch, `min` for `max`, or a statement
left out. Types, decorators and messages are not changed, nor is code outside functions.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

OPPOSITES: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Not: ("not", ""),
}
EXTREMES = {"min": "max", "max": "min"}
LOGS = ["warn", "warning", "info", "debug"]


class Edit(NamedTuple):
    """Other text for a part of one line; `begin` and `end` count bytes, as columns of ast do."""

    line: int
    begin: int
    end: int
    text: str


@dataclass(frozen=True)
class Change:
    """A changed line, drawn as number `id`."""

    id: int
    room: str
    file: str
    line: int
    was: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.was}  =>  {self.new.strip()}"


def _between(left: ast.expr, right: ast.expr, operator: ast.AST, lines: list[bytes]) -> list[Edit]:
    """Return the operator's opposite, if it stands on one line with its neighbours."""
    if type(operator) not in OPPOSITES or left.end_lineno != right.lineno:
        return []
    old, new = OPPOSITES[type(operator)]
    begin = left.end_col_offset or 0
    at = lines[right.lineno - 1][begin : right.col_offset].find(old.encode())
    return [Edit(right.lineno, begin + at, begin + at + len(old), new)] if at >= 0 else []


def _instead_of(node: Any, text: str) -> list[Edit]:
    if node.lineno != node.end_lineno:
        return []
    return [Edit(node.lineno, node.col_offset, node.end_col_offset, text)]


def _of_comparison(node: ast.Compare, lines: list[bytes]) -> list[Edit]:
    if len(node.ops) > 1:
        return []
    return _between(node.left, node.comparators[0], node.ops[0], lines)


def _of_arithmetic(node: ast.BinOp, lines: list[bytes]) -> list[Edit]:
    return _between(node.left, node.right, node.op, lines)


def _of_conditions(node: ast.BoolOp, lines: list[bytes]) -> list[Edit]:
    return _between(*node.values, node.op, lines) if len(node.values) == 2 else []


def _of_negation(node: ast.UnaryOp, _: list[bytes]) -> list[Edit]:
    if not isinstance(node.op, ast.Not) or node.lineno != node.end_lineno:
        return []
    return [Edit(node.lineno, node.col_offset, node.operand.col_offset, "")]


def _of_constant(node: ast.Constant, _: list[bytes]) -> list[Edit]:
    if isinstance(node.value, bool):
        return _instead_of(node, str(not node.value))
    return _instead_of(node, str(node.value + 1)) if isinstance(node.value, int) else []


def _of_branch(node: ast.If | ast.While | ast.IfExp, _: list[bytes]) -> list[Edit]:
    if not isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        return []
    return _instead_of(node.test, f"(not {ast.unparse(node.test)})")


def _of_statement(node: ast.stmt, _: list[bytes]) -> list[Edit]:
    """Return `pass` for a statement that binds no name, so that the code after it still runs."""
    acts = isinstance(node, ast.AugAssign)
    acts |= isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        acts = isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    return _instead_of(node, "pass") if acts else []


def _of_extreme(node: ast.Call, _: list[bytes]) -> list[Edit]:
    name = getattr(node.func, "id", "")
    if name not in EXTREMES or node.lineno != node.end_lineno:
        return []
    return [Edit(node.lineno, node.col_offset, node.col_offset + len(name), EXTREMES[name])]


EDITS: dict[type[ast.AST], Callable[[Any, list[bytes]], list[Edit]]] = {
    ast.Compare: _of_comparison,
    ast.BinOp: _of_arithmetic,
    ast.BoolOp: _of_conditions,
    ast.UnaryOp: _of_negation,
    ast.Constant: _of_constant,
    ast.If: _of_branch,
    ast.While: _of_branch,
    ast.IfExp: _of_branch,
    ast.AugAssign: _of_statement,
    ast.Expr: _of_statement,
    ast.Assign: _of_statement,
    ast.Call: _of_extreme,
}


def _without_logic(node: ast.AST) -> list[ast.AST]:
    """Return the parts of a node that are types, decorators or messages."""
    parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    parts += getattr(node, "decorator_list", [])
    is_log = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in LOGS
    if is_log or isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
        parts.append(node)
    return [part for part in parts if part is not None]


def edits_of(text: str) -> list[Edit]:
    """Return all edits of the functions in a module's text.

    >>> edits_of("def most(counts):\\n    return max(counts)\\n")
    [Edit(line=2, begin=11, end=14, text='min')]
    """
    tree, lines = ast.parse(text), text.encode().split(b"\n")
    nodes = list(ast.walk(tree))
    skipped = {part for node in nodes for whole in _without_logic(node) for part in ast.walk(whole)}
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {part for node in functions for whole in node.body for part in ast.walk(whole)}
    chosen = [node for node in nodes if node in inside and node not in skipped]
    return [
        edit for node in chosen if type(node) in EDITS for edit in EDITS[type(node)](node, lines)
    ]


def _changes_of_room(root: Path, room: str) -> list[Change]:
    found = []
    for path in sorted((root / "streampack" / room).rglob("*.py")):
        text = path.read_text()
        lines = text.split("\n")
        for edit in edits_of(text):
            was = lines[edit.line - 1]
            raw = was.encode()
            new = (raw[: edit.begin] + edit.text.encode() + raw[edit.end :]).decode()
            file = str(path.relative_to(root))
            found.append(Change(-1, room, file, edit.line, was.strip(), new))
    return found


def draw(root: Path, rooms: list[str], number: int, seed: int) -> list[Change]:
    """Return up to `number` changes, one from each of `rooms` in turn and no two of one line."""
    generator = random.Random(seed)
    pools = {room: _changes_of_room(root, room) for room in rooms}
    for pool in pools.values():
        generator.shuffle(pool)
    drawn: dict[tuple[str, int], Change] = {}
    while len(drawn) < number and any(pools.values()):
        for room in rooms:
            fresh = None
            while pools[room] and fresh is None:
                change = pools[room].pop()
                fresh = None if (change.file, change.line) in drawn else change
            if fresh is not None:
                numbered = asdict(fresh) | {"id": len(drawn)}
                drawn[fresh.file, fresh.line] = Change(**numbered)
    return list(drawn.values())[:number]
