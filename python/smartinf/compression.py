"""What compress= may say. Keys and defaults are those of the recipe's [compress] table, which the core knows."""

from smartinf import _core
from smartinf.errors import UsageError


def parse(value):
    """What is said and what is left out, as the core wants it; None: gradients are sent dense.

    value: None, a density (0.08 sends the largest 8 % of the elements), or a dict with it and any of
    values, error_feedback, residual_every, warmup_steps. Raises UsageError.
    """
    if value is None or value is False:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = {"density": value}
    if not isinstance(value, dict):
        raise UsageError(
            f"compress={value!r}: give a density (0.08 sends the signs of the largest 8 %) or a dict with it, as in a recipe"
        )
    options = _core.compress_options(value)
    if "density" not in value:
        raise UsageError('compress has no density; add "density": 0.08, the share of elements that are sent')
    return options if options["density"] != 0 else None


def has_residual(options):
    """Whether what is not sent waits for later steps."""
    return options is not None and options["error_feedback"]


def writes_residual_at_close(options):
    """Whether the residual is on the devices only every now and then, so that closing writes it."""
    return has_residual(options) and options["residual_every"] > 1
