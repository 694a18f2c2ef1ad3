"""The part of a stream that a slice names."""

from __future__ import annotations

from streampack.errors import ConfigError


def chosen_part(chosen: slice, count: int, option: str, name: str) -> tuple[int, int]:
    """Return the first and one past the last of the shards or samples that a slice selects.

    Raises:
        ConfigError: If it selects none, or not neighbouring ones.
    """
    first, stop, step = chosen.indices(count)
    if step != 1 or stop <= first:
        raise ConfigError(
            f"stream {name!r}: {option}={chosen} selects none of its {count} {option}, or not "
            f"neighbouring ones; write slice(first, stop) with 0 <= first < stop <= {count}"
        )
    return first, stop
