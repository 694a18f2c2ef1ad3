"""Check and convert the values of arguments: counts, sizes, choices.

::

    num_ranks=8.0          read_count     8
    epoch_size="10k"       parse_count    10000
    cache_limit="1.5kb"    parse_bytes    1536
    method="nextfit"       check_choice   ConfigError: ... did you mean 'next_fit'?

Functions named `read_` and `parse_` return the converted value. All raise ConfigErrors that name
the argument, its value and a way out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal
from numbers import Real
from operator import index
from typing import Any, get_args

from streampack.errors import ConfigError, suggest

BYTE_SUFFIXES = {"kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40, "pb": 2**50, "b": 1}
COUNT_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
MAX_ID = 2**31 - 1  # largest token id: batches hold int32
MAX_COUNT = 2**57  # of samples, tokens or bytes: sums and small multiples still fit in 64 bits
MAX_EPOCH = 10**6  # of a run
MAX_INTEGER_BITS = 1024  # as in the largest float
MAX_SHOWN_BITS = 256  # Python refuses to print an integer of more than 4,300 digits
WRITE_COUNT = "write a whole number of at least 1, such as 1024"


def check_choice(name: str, value: str, choices: object) -> None:
    """Check that `value` is one of the strings of a Literal or a tuple; suggest the nearest one."""
    words = choices if isinstance(choices, tuple) else get_args(choices)
    if value not in words:
        raise ConfigError(
            f"{name}={value!r} is not one of {'|'.join(words)}{suggest(value, words)}",
            option=name,
        )


def check_names(name: str, value: object) -> None:
    """Check that an option of several names is not one text, of which each letter would be one."""
    if isinstance(value, str):
        raise ConfigError(f"{name}={value!r} is one text; write [{value!r}]", option=name)


def read_json_object(name: str, value: Any) -> dict[str, Any]:
    """Return a mapping that JSON can store, or the JSON text of one, as a dict."""
    with suppress(TypeError, ValueError):
        read = json.loads(value if isinstance(value, str) else json.dumps(dict(value)))
        if isinstance(read, dict):
            return read
    raise ConfigError(
        f"{name}={value!r:.80} is not an object of JSON; write one such as "
        '{"enable_thinking": false}',
        option=name,
    )


def check_at_most(name: str, number: int, most: int) -> None:
    """Check that a number is not larger than the arithmetic here, or any machine, can handle."""
    if number > most:
        raise ConfigError(
            f"{name}={show_number(number)} is more than the maximum of {most}; lower it",
            option=name,
        )


def read_bool(name: str, value: Any) -> bool:
    """Return a bool as it is; refuse other types, 0 and 1 included."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not a bool; write True or False", option=name)
    return value


def read_integer(name: str, value: Any, way_out: str, least: int | None = None) -> int:
    """Convert an integral value, of at least `least`, to an int.

    Ints, numpy integers and floats such as 1e4 are integral. Bools, text and 10.5 are not.

    >>> read_integer("num_ranks", 8.0, "write 8")
    8
    """
    # Bools of numpy and torch also have __index__.
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    is_real = isinstance(value, Real)
    number = None
    if not is_bool:
        with suppress(TypeError):
            number = index(value)
        if number is None and is_real and value % 1 == 0:  # inf % 1 and nan % 1 are nan
            number = int(value)
    if number is None:
        raise ConfigError(f"{name}={value!r} is not an integer; {way_out}", option=name)
    if number.bit_length() > MAX_INTEGER_BITS:
        raise ConfigError(
            f"{name} is {show_number(number)}, too large for any use; {way_out}", option=name
        )
    if least is not None and number < least:
        raise ConfigError(
            f"{name}={show_number(number)} must be at least {least}; {way_out}", option=name
        )
    return number


def read_count(name: str, value: object, way_out: str = WRITE_COUNT) -> int:
    """Convert a count, from 1 to MAX_COUNT, to an int. None is not a count.

    >>> read_count("num_ranks", 8.0)
    8
    """
    count = read_integer(name, value, WRITE_COUNT)
    if count < 1:
        raise ConfigError(f"{name}={show_number(count)} must be at least 1; {way_out}", option=name)
    check_at_most(name, count, MAX_COUNT)
    return count


def read_optional_count(name: str, value: object) -> int | None:
    """Convert a count to an int as `read_count` does, but keep None."""
    return None if value is None else read_count(name, value, "omit it to use the default")


def read_token_id(name: str, value: Any) -> int | None:
    """Convert a token id, from 0 to MAX_ID, to an int. None is allowed for bos_id and eos_id."""
    if value is None and name != "padding_id":
        return None
    way_out = "omit it to use 0" if name == "padding_id" else "None adds none"
    token = read_integer(name, value, f"token ids go from 0 to {MAX_ID}, {way_out}")
    if not 0 <= token <= MAX_ID:
        raise ConfigError(
            f"{name}={token} is not a token id; they go from 0 to {MAX_ID}, {way_out}",
            option=name,
        )
    return token


def convert_fields(config: object, read: Callable[[str, Any], object], *names: str) -> None:
    """Replace fields of a frozen config by `read(name, value)`."""
    for name in names:
        object.__setattr__(config, name, read(name, getattr(config, name)))


def parse_share(part: str) -> slice:
    """Return the items that a share "K/N" has: every N-th one from the K-th on, counted from 1.

    >>> list(range(7))[parse_share("2/3")]
    [1, 4]
    """
    number, _, total = part.partition("/")
    if not (number.isdecimal() and total.isdecimal() and 0 < int(number) <= int(total)):
        raise ConfigError(
            f"part={part!r} is not K/N with K from 1 to N, such as 1/16 on the first of 16 "
            "machines; omit it to do everything here",
            option="part",
        )
    return slice(int(number) - 1, None, int(total))


def parse_count(name: str, value: object) -> int | None:
    """Parse a count in MosaicML Streaming's notation: a number, or text such as "10k" or "1.5b".

    >>> parse_count("epoch_size", "10k")
    10000
    """
    way_out = "a number; write 10000, '10k', '1.5m' or '2b'"
    return _parse(name, value, COUNT_SUFFIXES, round, way_out)


def parse_bytes(name: str, value: object) -> int | None:
    """Parse a size in MosaicML Streaming's notation: a number, or text such as "50gb".

    Units are binary: 1 kb is 1,024 bytes, 1 gb is 1,073,741,824 bytes.

    >>> parse_bytes("cache_limit", "1.5kb")
    1536
    """
    way_out = "a number of bytes; write 500000000, '500mb' or '1.5gb'"
    return _parse(name, value, BYTE_SUFFIXES, int, way_out)


def _parse(
    name: str,
    value: object,
    suffixes: Mapping[str, int],
    to_int: Callable[[float], int],
    expected: str,
) -> int | None:
    if isinstance(value, str):
        text = value.strip().lower()
        suffix = next((suffix for suffix in suffixes if text.endswith(suffix)), "")
        digits, factor = text.removesuffix(suffix), suffixes.get(suffix, 1)
        try:
            # Not all through float: an integer of many digits stays exact.
            value = int(digits) * factor if digits.isdigit() else to_int(float(digits) * factor)
        except (OverflowError, ValueError):
            raise ConfigError(f"{name}={value!r} is not {expected}", option=name) from None
    return read_optional_count(name, value)


def is_weight(value: Any) -> bool:
    """Whether a value is a finite number of at least 0, and not a bool.

    >>> is_weight(0.5), is_weight("0.5"), is_weight(float("nan")), is_weight(True)
    (True, False, False, False)
    """
    if isinstance(value, Decimal):
        return value.is_finite() and value >= 0  # comparing a NaN Decimal raises
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and bool(0 <= value < float("inf"))


def show_number(number: Any) -> str:
    """Return the repr of a number, or only its size in bits if it has too many digits.

    >>> show_number(12), show_number(10**400)
    ('12', 'an integer of 1329 bits')
    """
    if isinstance(number, int) and number.bit_length() > MAX_SHOWN_BITS:
        return f"an integer of {number.bit_length()} bits"
    return repr(number)
