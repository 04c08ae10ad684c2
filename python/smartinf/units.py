"""What of a model is brought to memory at once: its blocks, and large modules outside of them."""

import collections
import inspect

import torch

from smartinf.errors import UsageError

_KEPT_BYTES = 1 << 20  # modules outside of blocks with fewer bytes of parameters stay in memory


class Unit:
    """Parameters that are in memory together.

    name: of the module. params: [(name, parameter)], in the model's order; a parameter that several modules have
    belongs to the first.
    """

    def __init__(self, name):
        self.name = name
        self.params = []

    @property
    def elements(self):
        return sum(param.numel() for _, param in self.params)


class Units:
    """units: in the order of the model's modules. blocks: the modules that are a unit whole. of_module: {module:
    indices of the units that its forward needs}, for blocks and for modules outside of them that have parameters of
    their own. kept: [(name, parameter)] of parameters that are in no unit. shared: ids of parameters that several of
    these modules have. experts: {module: its parameters that have an expert in each row}."""

    def __init__(self, units, of_module, kept, blocks, shared, experts):
        self.units, self.of_module, self.kept = units, of_module, kept
        self.blocks, self.shared, self.experts = blocks, shared, experts


def find_units(model, layers=None):
    """The units of a model. layers: the blocks: modules, their names, or the name of a ModuleList; None: what
    transformers says must not be split, else the modules that gradient checkpointing works on, else the elements of
    the largest ModuleList. Errors: UsageError where none are found, or one contains another."""
    blocks = _blocks(model, layers)
    dtype = _streamed_dtype(model)
    names = {id(param): name for name, param in model.named_parameters()}
    units, of_module, kept, seen, shared = [], {}, [], {}, set()

    def add(name, params, is_block):
        """Returns the units that hold `params`; those not seen before make one of their own."""
        new = [p for p in params if id(p) not in seen]
        shared.update(id(p) for p in params if id(p) in seen)
        streamed = [p for p in new if p.dtype == dtype and p.numel() > 0]
        if not is_block and sum(p.numel() * p.itemsize for p in streamed) < _KEPT_BYTES:
            streamed = []
        if streamed:
            unit = Unit(name)
            streamed.sort(key=lambda p: id(p) in with_experts)  # what is read whole lies together
            unit.params = [(names[id(p)], p) for p in streamed]
            seen.update((id(p), len(units)) for p in streamed)
            units.append(unit)
        for p in new:
            if id(p) not in seen:
                seen[id(p)] = None
                kept.append((names[id(p)], p))
        return sorted({seen[id(p)] for p in params} - {None})

    experts = {m: params for block in blocks for m in block.modules() if (params := _expert_params(m))}
    with_experts = {id(param) for params in experts.values() for param in params}
    inside = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        if module in blocks:
            inside.update(module.modules())
            needed = add(name, list(dict.fromkeys(module.parameters())), True)
        else:
            needed = add(name, list(module.parameters(recurse=False)), False)
        if needed:
            of_module[module] = needed
    if not units:
        raise UsageError("the model has no parameters that could be streamed")
    return Units(units, of_module, kept, blocks, shared, experts)


def _expert_params(module):
    """The parameters of a module of transformers that computes with the experts that it is told: forward(hidden states,
    experts of each token, their weights), or none."""
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or count < 2 or "top_k_index" not in inspect.signature(module.forward).parameters:
        return []
    return [p for p in module.parameters(recurse=False) if p.dim() > 1 and p.shape[0] == count]


def _streamed_dtype(model):
    """The type that most of the parameters' bytes have; parameters of other types stay in memory."""
    sizes = collections.Counter()
    for param in model.parameters():
        sizes[param.dtype] += param.numel()
    return max(sizes, key=sizes.get) if sizes else torch.float32


def _blocks(model, layers):
    if layers is not None:
        return _named_blocks(model, [layers] if isinstance(layers, (str, torch.nn.Module)) else layers)
    classes = getattr(model, "_no_split_modules", None) or ()
    found = [m for m in model.modules() if type(m).__name__ in classes]
    if not found:
        found = [m for m in model.modules() if _has_base(m, "GradientCheckpointingLayer")]
    if not found:
        lists = [m for m in model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential))]
        alike = [m for m in lists if len(m) > 1 and len({type(child) for child in m}) == 1]
        largest = max(alike, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)
        found = [] if largest is None else list(largest)
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no list of equal blocks that could be streamed one after another; name its "
            'blocks: layers="encoder.layers", or a list of modules'
        )
    return _outermost(found)


def _named_blocks(model, layers):
    found = []
    for given in layers:
        module = given
        if isinstance(given, str):
            try:
                module = model.get_submodule(given)
            except AttributeError:
                raise UsageError(f"layers: the model has no module named {given!r}") from None
        if not isinstance(module, torch.nn.Module) or module not in set(model.modules()):
            raise UsageError(f"layers: {given!r} is no module of the model")
        found += list(module) if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) else [module]
    return _outermost(found)


def _outermost(modules):
    """Without those that are within another."""
    within = {inner for module in modules for inner in module.modules() if inner is not module}
    return {module for module in modules if module not in within}


def _has_base(module, name):
    return any(base.__name__ == name for base in type(module).__mro__)
