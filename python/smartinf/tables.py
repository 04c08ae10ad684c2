"""Tables: embeddings of which a step touches few rows, kept on an optimizer's devices row by row (docs/rows.md)."""

import fnmatch
import weakref
import os
from collections.abc import Sequence

import torch

from smartinf import nn, open_optimizers, table_files
from smartinf.errors import UsageError
from smartinf.layout import TYPE_NAMES
from smartinf.process_memory import FreedMemory
from smartinf.sizes import parse_bytes
from smartinf.storage_options import Devices, Size, device_list

__all__ = ["move_tables"]

_RULES = ("sparse_adam", "row_adagrad", "row_adam", "sgd", "adamw")
_ROWS_AT_ONCE = 1 << 16  # that are written to devices in one call
_moved = weakref.WeakKeyDictionary()  # model -> Tables


def move_tables(
    model: torch.nn.Module, names: Sequence[str] | str, devices: Devices | None = None, *, rule: str = "sparse_adam",
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, lr_scale: float = 1.0, std: float | None = None,
    weights: str | os.PathLike | None = None, memory: Size = "256MiB", log: Size | None = None,
) -> list[str]:  # fmt: skip
    """Makes tables on devices of a model's torch.nn.Embedding and EmbeddingBag modules, and returns their names. Call it
    before the model's optimizer is made, which then keeps the tables on its devices and commits their rows with each step.
    Their weights are no parameters any more: neither model.parameters() nor model.state_dict() has them.

    names: of modules, or patterns as "*.ngram_embedding"; a name without what stands before it is enough.
    devices: of the optimizer, where that is not told any.
    rule: "sparse_adam" (torch.optim.SparseAdam: rows without a gradient rest), "row_adagrad" and "row_adam" (one number
        of state a row in place of one a weight), "sgd", or "adamw" (dense AdamW without decay, bit for bit: rows
        that were left out are brought up when they are next used).
    betas, eps: of the rule. lr_scale: a table's learning rate is that of the optimizer's first group times this.
    std: rows begin as random numbers of this deviation, made when they are first used, in place of the values that the
        modules have; needed where they have none (device "meta"), the same whenever the run is opened again.
    weights: a safetensors file or a folder of a model that has what rows begin with, under the module's name and
        ".weight", in place of the values that the modules have; read some rows at a time.
    memory: bytes for where rows are and for a cache of rows, of all tables of the model together.
    log: bytes on the devices for rows on their way to their place; None: chosen.

    A module whose weight does not require gradients becomes a table that is only read.
    Errors: UsageError for a name that fits no embedding, a weight that other modules share, and options of an embedding
    (max_norm, scale_grad_by_freq) that need all rows."""
    if rule not in _RULES:
        raise UsageError(f"rule={rule!r}: known are {', '.join(map(repr, _RULES))}")
    if not all(0 <= beta < 1 for beta in betas) or len(betas) != 2 or not 1e-30 <= eps <= 1:
        raise UsageError(f"betas={betas!r}, eps={eps!r}: two betas from 0 to below 1 and an eps from 1e-30 to 1 are needed")
    modules = _embeddings(model, [names] if isinstance(names, str) else list(names))
    if std is not None and weights is not None:
        raise UsageError("std= and weights= both say what rows begin with; leave one out")
    stored = {}
    for name, module in modules.items():
        _check(model, name, module, std, weights)
        if weights is not None:
            stored[name] = table_files.StoredRows(weights, f"{name}.weight", module.weight.shape)
    if open_optimizers.of_parameters([module.weight for module in modules.values()]):
        raise UsageError("move_tables() after the optimizer was made, which has the weights as parameters: call it before")
    tables = _moved.setdefault(model, Tables())
    tables.reject_open()
    tables.memory_bytes = parse_bytes(memory, "memory")
    tables.log_bytes = 0 if log is None else parse_bytes(log, "log")
    tables.devices = device_list(devices) or tables.devices
    options = {
        "rule": rule, "beta1": float(betas[0]), "beta2": float(betas[1]), "eps": float(eps), "deviation": float(std or 0)
    }  # fmt: skip
    for name, module in modules.items():
        weight = module._parameters.pop("weight")
        module.table = Table(tables, name, weight, options, lr_scale, stored.get(name, weight if std is None else None))
        module.weight = nn.weight_of(name, weight.shape, weight.dtype, "cpu" if weight.is_meta else weight.device)
        module.__class__ = _class_of(type(module))
    return list(modules)


def _embeddings(model, patterns):
    """{name: module} of those that patterns name, in the order of the model."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    known = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    wanted = set()
    for pattern in patterns:
        fits = [name for name in known if any(fnmatch.fnmatchcase(name, p) for p in (pattern, f"*.{pattern}"))]
        if not fits:
            raise UsageError(f"{pattern} is the name of no embedding of the model; there are {', '.join(known) or 'none'}")
        wanted.update(fits)
    return {name: module for name, module in known.items() if name in wanted}


def _check(model, name, module, std, weights):
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        raise UsageError(f"{name} is a table already")
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option):
            raise UsageError(f"{name} has {option}={getattr(module, option)}, which rows on devices cannot do; leave it out")
    others = [other for other, p in model.named_parameters(remove_duplicate=False) if p is module.weight]
    if len(others) > 1:
        others.remove(f"{name}.weight")
        raise UsageError(f"{name} shares its weight with {', '.join(others)}, which uses all rows; leave it out")
    if module.weight.dtype not in TYPE_NAMES:
        raise UsageError(f"{name} is {module.weight.dtype}; known are float32, bfloat16 and float16")
    if module.weight.is_meta and std is None and weights is None:
        raise UsageError(
            f'{name} has no values (device "meta"): say by std= what deviation its rows begin with, or by weights= in what file '
            "they are"
        )
    if module.weight.is_meta and weights is None and not module.weight.requires_grad:
        raise UsageError(f"{name} has no values and is not trained, so there would be nothing to read")


def _class_of(plain):
    """`plain`, a class of embeddings, over rows on devices: what it does beside the lookup stays as it is."""
    base = nn.EmbeddingBag if issubclass(plain, torch.nn.EmbeddingBag) else nn.Embedding
    if plain in (torch.nn.Embedding, torch.nn.EmbeddingBag):
        return base
    named = {key: getattr(plain, key) for key in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (plain, base), named)


class Table:
    """One table of a model. trained: its rows are updated. held: values of before the devices have them, or None."""

    def __init__(self, tables, name, weight, options, lr_scale, values):
        self.tables, self.name, self.lr_scale = tables, name, lr_scale
        self.shape, self.dtype, self.trained = weight.shape, weight.dtype, weight.requires_grad
        self.held = values.detach() if isinstance(values, torch.Tensor) else values
        self.options = options | {
            "name": name, "rows": self.shape[0], "dim": self.shape[1], "kind": "state" if self.trained else "data"
        }  # fmt: skip
        self.index = len(tables.tables)
        tables.tables.append(self)

    def __deepcopy__(self, memo):
        raise UsageError(f"{self.name} has its rows on devices and cannot be copied; copy the model before move_tables()")

    def __reduce__(self):
        self.__deepcopy__(None)

    def prefetch(self, ids):
        self.tables.core().prefetch_rows(self.index, ids.data_ptr(), len(ids))

    def gather(self, ids, dtype=None, keep=False):
        """[ids, dim] in CPU memory, of the table's type unless another is given. keep: a gradient will follow."""
        dtype = dtype or self.dtype
        if isinstance(self.held, torch.Tensor) and not keep:  # nobody has trained yet
            return self.held[ids.to(self.held.device)].to("cpu", dtype)
        out = torch.empty(len(ids), self.shape[1], dtype=dtype)
        self.tables.core().gather_rows(self.index, ids.data_ptr(), len(ids), TYPE_NAMES[dtype], out.data_ptr(), keep)
        return out

    def keep_gradient(self, ids, gradient):
        if gradient.dtype not in TYPE_NAMES:
            raise UsageError(f"the gradient of {self.name} is {gradient.dtype}; known are float32, bfloat16 and float16")
        self.tables.pending.append((self, ids, gradient))

    def put(self, core):
        """Gives the devices the values that are held."""
        for first in range(0, self.shape[0] if self.held is not None else 0, _ROWS_AT_ONCE):
            values = self.held[first : first + _ROWS_AT_ONCE].to("cpu", torch.float32).contiguous()
            ids = torch.arange(first, first + len(values))
            core.put_rows(self.index, ids.data_ptr(), len(ids), values.data_ptr())


class Tables:
    """All tables of a model, and the session that has them. pending: (table, ids, gradient) of backward since the last
    step, in that order."""

    def __init__(self):
        self.tables, self.pending = [], []
        self.devices, self.memory_bytes, self.log_bytes = [], 0, 0
        self.freed = None  # memory of gradients
        self.session = self.optimizer = None  # of the optimizer, and a weak reference to it

    def reject_open(self):
        """A session lives as long as the model needs its rows, also where its optimizer was deleted; a new one takes its
        place."""
        if self.session is None or self.session.core is None:
            return
        if self.optimizer() is not None:
            raise UsageError("the model's tables have an optimizer already; close() it first")
        self.session.close()

    def core_options(self):
        return {
            "tables": [table.options for table in self.tables],
            "table_memory_bytes": self.memory_bytes,
            "table_log_bytes": self.log_bytes,
        }

    def core(self):
        if self.session is None:
            names = ", ".join(table.name for table in self.tables)
            raise UsageError(f"rows of {names} are needed before the devices have them: make the optimizer first")
        return self.session.opened()

    def initialize(self, core):
        """The devices are empty."""
        for table in self.tables:
            table.put(core)

    def attach(self, session):
        """The devices have all rows."""
        self.session = session
        self.freed = FreedMemory(least=self.memory_bytes // 32)
        for table in self.tables:
            table.held = None

    def hand_over(self, core, world):
        """The gradients of the step that has begun, averaged over `world` ranks as all others are."""
        for table, ids, gradient in self.pending:
            if world > 1:
                gradient = gradient.to(torch.float32) / world
            core.add_row_gradient(table.index, ids.data_ptr(), len(ids), TYPE_NAMES[gradient.dtype], gradient.data_ptr())
        freed = sum(gradient.nbytes for _, _, gradient in self.pending)
        self.pending.clear()
        self.freed.freed(4 * freed)  # with what backward has made on the way

    def rates(self, lr):
        return [lr * table.lr_scale for table in self.tables]

    def forget(self):
        self.pending.clear()


def of_model(model):
    """The Tables of a model, or None."""
    return _moved.get(model)


def of(params):
    """The Tables of the model that one of the parameters belongs to, or None."""
    wanted = {id(param) for param in params}
    for model, tables in list(_moved.items()):
        if any(id(param) in wanted for param in model.parameters()):
            return tables
    return None
