"""Columns that say which tokens are targets, and that nobody asked for.

::

    index.json, or the first sample: input_ids, loss_mask      Stream(...) without loss_mask=
                                         '--> a warning: trained on everything is a likely mistake

Cost: none; a look at names.
"""

from __future__ import annotations

import logging

__all__ = ["TARGET_COLUMNS", "tell_of_unread"]

logger = logging.getLogger(__name__)

TARGET_COLUMNS = {"labels": "labels", "loss_mask": "loss_mask", "assistant_masks": "loss_mask"}
"""Usual names of such columns, and the argument of a stream that reads each."""


def tell_of_unread(kind: str, name: str, column: str) -> None:
    """Warn that a column is not read: without `labels=` and `loss_mask=` every token is a target.

    Args:
        kind: The stream's class.
        name: What messages call the stream.
        column: One of `TARGET_COLUMNS`.
    """
    logger.warning(
        "stream %r: its %r is not read, so every token is a target; set %s(%s=%r) to read it, or, "
        "if it is left out on purpose, silence the logger %r",
        name,
        column,
        kind,
        TARGET_COLUMNS[column],
        column,
        __name__,
    )
