"""No row of the reliability table is without a test."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.helpers.faults import rows


def test_every_row_of_the_table_is_held_by_a_test_that_names_it():
    assert len(rows.NAMES) == len(set(rows.NAMES)) == 93
    assert sorted(rows.ROWS) == sorted(rows.NAMES)
    for row, (file, function) in rows.ROWS.items():
        text = Path(__file__).with_name(file).read_text()
        functions = {
            node.name: ast.get_source_segment(text, node) or ""
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef)
        }
        assert function in functions, f"{row}: {file} has no {function}"
        assert row in text, f"{row}: {file} does not name it"
