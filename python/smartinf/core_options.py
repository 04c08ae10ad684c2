"""What a session makes its core with: the keywords, and what depends on the parameters."""

import logging

import torch

_BLOCK_ELEMENTS = 1 << 16  # of the devices' checksummed blocks, the least a device can hold
_SUBGROUP_BLOCKS = 16  # at most, as where the core chooses: a process with less memory has to have room for one
_WORTH_MEASURING_BYTES = 1 << 30
_log = logging.getLogger("smartinf")


def devices_for(layout, given):
    """Those of the devices given that are used. A small model, as of LoRA adapters, may have no block for the last
    ones."""
    enough = -(-layout.owned_count // _BLOCK_ELEMENTS)
    if enough < len(given):
        _log.info(
            "%d elements are too few for %d devices, each of which holds %d at least; left out: %s",
            layout.owned_count,
            len(given),
            _BLOCK_ELEMENTS,
            ", ".join(device["path"] for device in given[enough:]),
        )
    return given[:enough]


def options_of(options, layout, devices):
    """What the core is made with, but for the rule's options."""
    gradient_type = options.gradient_type
    if gradient_type is None:
        gradient_type = "bf16" if layout.dtype == torch.bfloat16 else "f32"
    made = {**options.core, "gradient_type": gradient_type, "devices": devices}
    if layout.streams:
        made["stream_weights"] = True
    if 4 * layout.total * (1 + len(options.state_keys)) < _WORTH_MEASURING_BYTES:
        # Measuring the devices takes seconds; so little state gains nothing from it.
        made |= {"io_bytes": 4 << 20, "io_depth": 8}
        made["devices"] = [{"bandwidth": 1.0, **device} for device in devices]
        if len(devices) > 1 and made["subgroup_elements"] == 0:
            # Every device gets some of the state.
            blocks = -(-layout.owned_count // _BLOCK_ELEMENTS)
            made["subgroup_elements"] = min(max(blocks // (4 * len(devices)), 1), _SUBGROUP_BLOCKS) * _BLOCK_ELEMENTS
    return made
