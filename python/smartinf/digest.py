"""A number that all of a tensor's values decide, found where the tensor is."""

import functools

import torch

_CHUNK = 1 << 22  # elements
_INTEGERS = {1: torch.int8, 2: torch.int16}  # wider ones by four bytes: a product has to keep their highest bits apart


@functools.lru_cache
def _factors(device):
    """Odd and otherwise random: a value that changes, and values that change places, change the sum."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(-(2**63), 2**63 - 1, (_CHUNK,), generator=generator) | 1).to(device)


def digest(tensor):
    """A tensor of one int64, on the tensor's device."""
    flat = tensor.reshape(-1).view(_INTEGERS.get(tensor.element_size(), torch.int32))
    factors = _factors(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in flat.split(_CHUNK):
        total = total * 6364136223846793005 + (piece * factors[: piece.numel()]).sum()
    return total
