"""Warning about label and loss mask columns that are present but not read.

::

    index.json, or the first sample: input_ids, loss_mask      Stream(...) without loss_mask=
                                         '--> a warning: training on everything is a likely mistake
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

TARGET_COLUMNS = {
    "labels": "labels",
    "loss_mask": "loss_mask",
    "assistant_masks": "loss_mask",
    "completion_mask": "loss_mask",
}
"""Usual names of such columns, with the stream argument that reads each."""


def warn_unused_label_column(kind: str, name: str, column: str) -> None:
    """Warn that one of `TARGET_COLUMNS` is not read by stream `name` of class `kind`."""
    logger.warning(
        "stream %r: its %r is not read, so every token is a target; set %s(%s=%r) to read it, or, "
        "if it is omitted on purpose, silence the logger %r",
        name,
        column,
        kind,
        TARGET_COLUMNS[column],
        column,
        __name__,
    )
