"""Byte counts as people write them."""

import math
import re

from smartinf.errors import UsageError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}


def bytes_text(count):
    """1500 as "1.5 KiB": rounded up, so that what is needed is enough."""
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{math.ceil(count / size * 10) / 10:g} {unit}"
    return f"{count} B"


def parse_bytes(value, what):
    """``512 << 20``, ``"512MiB"`` or ``"0.5 GiB"`` as a number of bytes.

    Raises UsageError that names `what` for anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return int(value)
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if match and match[2].lower() in _UNITS and float(match[1]) > 0:
            return int(float(match[1]) * _UNITS[match[2].lower()])
    raise UsageError(f'{what}={value!r} is not a size. Give bytes, or text such as "512MiB" or "2GB".')
