"""What compress= may say. Keys and defaults are those of the recipe's [compress] table."""

import difflib

from smartinf.errors import UsageError

_TYPES = {
    "density": float,
    "values": str,
    "error_feedback": bool,
    "residual_every": int,
    "warmup_steps": int,
}
_RESIDUAL_EVERY = 16  # the core's default


def parse(value):
    """The keys given, as the core wants them; None: gradients are sent dense.

    value: None, a density (0.08 sends the largest 8 % of the elements), or a dict with it and any of
    values, error_feedback, residual_every, warmup_steps. Raises UsageError.
    """
    if value is None or value is False:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = {"density": value}
    if not isinstance(value, dict):
        raise UsageError(
            f"compress={value!r}: give a density (0.08 sends the signs of the largest 8 %) or a dict "
            f'with any of {", ".join(_TYPES)}'
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
    if "density" not in options:
        raise UsageError("compress has no density; add \"density\": 0.08, the share of elements that are sent")
    return options if options["density"] != 0 else None


def has_residual(options):
    """Whether what is not sent waits for later steps."""
    return options is not None and options.get("error_feedback", True)


def writes_residual_at_close(options):
    """Whether the residual is on the devices only every now and then, so that closing writes it."""
    return has_residual(options) and options.get("residual_every", _RESIDUAL_EVERY) > 1
