"""Every fault of the reliability table has a test."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.helpers.faults.rows import MACHINES, ROWS, STORES

TESTS = Path(__file__).parents[1]


def test_every_fault_of_the_table_has_a_test_that_names_it():
    assert len(ROWS) == sum(map(len, (STORES | MACHINES).values())) == 93
    for row, (file, function) in ROWS.items():
        text = (TESTS / file).read_text()
        names = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
        assert function in names, f"{row}: {file} has no {function}"
        assert row in text or not file.startswith("faults/"), f"{row}: {file} does not name it"
