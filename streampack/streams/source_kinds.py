"""What can be known of a source of samples before it is gone through.

::

    list, map-style dataset          has_index, num_items
    generator                        is_one_shot
    Hugging Face, MosaicML Streaming known by the names of their classes: nothing is imported

Cost: none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

__all__ = [
    "forgets_its_buffer",
    "has_index",
    "is_hugging_face",
    "is_mosaic",
    "is_one_shot",
    "num_items",
    "reads_many",
]


def _is_from(source: object, library: str, name: str) -> bool:
    """Tell whether a source is of a library's class, without importing the library."""
    return any(
        base.__name__ == name and base.__module__.partition(".")[0] == library
        for base in type(source).__mro__
    )


def is_one_shot(source: object) -> bool:
    """Tell whether a source goes on where it was left, such as a generator.

    >>> is_one_shot([1]), is_one_shot(iter([1]))
    (False, True)
    """
    return isinstance(source, Iterator)


def num_items(source: object) -> int | None:
    """Return how many items a source holds over all parts; None if it does not say.

    >>> num_items([5, 6]), num_items(iter([5, 6]))
    (2, None)
    """
    if not isinstance(source, Sized):
        return None
    try:
        # MosaicML's len() is what one rank gets, its `size` what all do.
        return int(getattr(source, "size", len(source)) if is_mosaic(source) else len(source))
    except (TypeError, NotImplementedError):  # a __len__ that only some instances can answer
        return None


def is_mosaic(source: object) -> bool:
    """Tell whether a source is a MosaicML `StreamingDataset`."""
    return _is_from(source, "streaming", "StreamingDataset")


def is_hugging_face(source: object) -> bool:
    """Tell whether a source is a Hugging Face iterable, which has a state and splits itself."""
    return _is_from(source, "datasets", "IterableDataset")


def has_index(source: object) -> bool:
    """Tell whether the items of a source can be had by their numbers, in any order.

    >>> has_index([5, 6]), has_index(iter([5, 6])), has_index({"a": 5})
    (True, False, False)
    """
    is_plain = not (is_mosaic(source) or is_hugging_face(source) or isinstance(source, dict))
    is_torch_iterable = _is_from(source, "torch", "IterableDataset")
    has = hasattr(source, "__getitem__") and num_items(source) is not None
    return is_plain and has and not is_torch_iterable


def reads_many(source: object) -> bool:
    """Tell whether a Hugging Face dataset reads some rows for hardly more than one.

    A transform may look at the others, so with one each row is read alone.
    """
    is_dataset = _is_from(source, "datasets", "Dataset") and hasattr(source, "__getitems__")
    return is_dataset and getattr(source, "_format_type", "custom") in (None, "numpy")


def forgets_its_buffer(source: object) -> bool:
    """Tell whether a Hugging Face iterable shuffles in a buffer that its state leaves out."""
    inner = getattr(source, "_ex_iterable", None)
    while inner is not None:
        if "BufferShuffled" in type(inner).__name__:
            return True
        inner = getattr(inner, "ex_iterable", None)
    return False
