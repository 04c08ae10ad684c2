"""What compress= may say. Keys and defaults are those of the recipe's [compress] table."""

import difflib

from smartinf.errors import UsageError

_TYPES = {
    "codec": str,
    "ratio": float,
    "ratio_max": float,
    "backlog": float,
    "values": str,
    "feedback": str,
    "feedback_decay": float,
    "variance": str,
    "step_ahead": bool,
    "warmup_steps": int,
    "keep_every": int,
}


def parse(value):
    """The keys given, as the core wants them; None: gradients go whole.

    value: None, a ratio (0.02), a codec ("topk"), or a dict with any of codec, ratio, ratio_max,
    backlog, values, feedback, feedback_decay, variance, step_ahead, warmup_steps,
    keep_every. Raises UsageError.
    """
    if value is None or value is False or value == "none":
        return None
    if isinstance(value, str):
        value = {"codec": value}
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        value = {"ratio": value}
    if not isinstance(value, dict):
        raise UsageError(
            f"compress={value!r}: give a ratio (0.02 sends the signs of the largest 8 %), "
            f'a codec ("topk"), or a dict with any of {", ".join(_TYPES)}'
        )
    options = {}
    for key, given in value.items():
        kind = _TYPES.get(key)
        if kind is None:
            near = difflib.get_close_matches(str(key), _TYPES, 1, 0)[0]
            raise UsageError(f"compress has no key {key!r}; did you mean {near!r}?")
        fits = isinstance(given, (int, float) if kind is float else kind)
        if not fits or isinstance(given, bool) != (kind is bool) or (kind is int and given < 0):
            what = {
                str: "text",
                float: "a number",
                int: "a whole number, 0 or more",
                bool: "True or False",
            }[kind]
            raise UsageError(f"compress[{key!r}]={given!r} must be {what}")
        options[key] = kind(given)
    if options.get("codec", "topk") == "none":
        return None
    return {"codec": "topk", **options}


def keeps(options):
    """Whether what is not sent is kept for later steps."""
    return options is not None and options.get("feedback", "host") == "host"


def keeps_at_close(options):
    """Whether what is kept is on the devices only every now and then, so that closing writes it."""
    return keeps(options) and options.get("keep_every", 1) > 1
