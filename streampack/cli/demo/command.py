"""``streampack demo``: real text, a small model, a crash and an exact resume."""

from __future__ import annotations
