"""The units of a streamed model: brought to memory while a module computes forward or backward, and let go of again,
through windows over what holds them: the file that the model was read into, and the optimizer's state once there is one."""

import collections
import contextlib
import inspect
import threading
import time

import torch

from smartinf.absent_parameter import POINTERS, absent_class, without_values
from smartinf.errors import UsageError
from smartinf.layer_window import Window
from smartinf.modules import check_version, current_backward, mapped, tensors_in, top_saved_tensors_hooks
from smartinf.process_memory import FreedMemory
from smartinf.residency import Place, Residency, attach

_WEIGHT, _OUTER = "weight", "outer"  # how a saved tensor was packed; else its version


class LayerStream(Residency):
    """params, names: of all streamed parameters, unit after unit. unit_of: the unit of each.

    A unit's parameters are HERE while somebody holds it (gather, release), and AWAY otherwise.
    Threads: autograd's and the model's; calls take turns. Errors: of the devices, named; UsageError once it is closed.
    """

    releases = True

    def __init__(self, units, weights, firsts, device, shared, experts):
        """weights: the file with the values. firsts: the element there of each parameter. shared: ids of the model's
        parameters that several units use. experts: ids of those that have an expert in each row, of which only the
        rows that somebody asks for are read (read_experts)."""
        named = [(name, param) for unit in units for name, param in unit.params]
        super().__init__(len(named))
        self.units, self.shared = units, shared
        self.names, self.params = [name for name, _ in named], [param for _, param in named]
        self.unit_of = [u for u, unit in enumerate(units) for _ in unit.params]
        self.experts = frozenset(i for i, param in enumerate(self.params) if id(param) in experts)
        self._rows = {}  # index of one of these that has values: the rows that are there
        self.dtype = self.params[0].dtype
        self.device = device
        self.waited_s = 0.0  # for weights that were not there when they were used
        self._turn = threading.RLock()
        self._holds = collections.Counter()  # by unit
        self._freed = FreedMemory()
        self._absent = {}  # by index: what the parameter is where it has no values
        self._lingering = set()  # units that nobody holds, and that are still there
        self._in_backward = frozenset()  # units that a backward pass holds
        self._versions = {}  # index of a parameter that has values: torch's version of it
        self._generation = 0  # updates of the trained parameters
        self._by_storage = {}  # address of a storage -> index of the parameter that has it
        self._uses, self._last_uses, self._mode, self._joined = [], {}, None, False
        self._entered = threading.local()  # .stack of forwards: what was entered before each, and is to be left after it
        self._weights = weights
        self._read_only = Window(self, weights.core, dict(enumerate(firsts)), 0, [])
        self._trained = None
        for index, param in enumerate(self.params):
            _set_to_itself(param)
            self._empty(index)

    def attach(self, model, of_module, blocks, experts):
        """of_module: {module: units}. blocks: those of them whose forward may be computed again in backward. experts:
        {module: parameters}."""
        attach(self, model, {module: _Own(units, module in blocks) for module, units in of_module.items()})
        for module, params in experts.items():
            indices = [index for param in params if (index := self.index_of(param)) is not None]
            if indices:
                module.register_forward_pre_hook(_expert_hook(self, module, indices), with_kwargs=True)

    # ---- Where values come from.

    def train_with(self, core, layout):
        """From now on parameters in `layout` are those that `core` updates."""
        with self._turn:
            self._let_go()
            firsts = {i: layout.firsts[layout.index_of[id(p)]] for i, p in enumerate(self.params)
                      if id(p) in layout.index_of}  # fmt: skip
            self._trained = Window(self, core, firsts, layout.flat.data_ptr(), layout.kept_spans) if firsts else None
            frozen = {i: f for i, f in self._read_only.firsts.items() if i not in firsts} if self._read_only else {}
            if self._read_only is None or len(frozen) < len(self._read_only.firsts):
                if self._read_only is not None:
                    self._read_only.close()
                self._read_only = Window(self, self._weights.core, frozen, 0, []) if frozen else None
                if not frozen:
                    self._weights.close()
            self._last_uses.clear()

    @property
    def trained(self):
        """Whether values are in an optimizer's state, and nowhere else."""
        return self._trained is not None

    @property
    def has_open_optimizer(self):
        return self._trained is not None and self._trained.is_open

    def updated(self, values_change=True):
        """An update was started, or taken back: what is in memory is not current. values_change: of streamed ones."""
        with self._turn:
            self._let_go()
            self._generation += values_change
            if self._trained is not None:
                self._trained.updated()

    def close_trained(self, core):
        """The optimizer of `core` closes: its parameters have no values until another one is made."""
        with self._turn:
            if self.has_open_optimizer and self._trained.source is core:
                self._let_go()
                self._trained.close()

    # ---- Holding units.

    def begin_forward(self):
        """A pass over the model begins: its uses are likely to be those of the last one like it."""
        if current_backward() != -1:
            return  # a forward that is computed again in backward is no new pass
        # torch calls no hooks after a forward that KeyboardInterrupt has ended. At the beginning of a pass none is open.
        stack = getattr(self._entered, "stack", [])
        while stack:
            self._leave(*stack.pop())
        with self._turn:
            if self._joined:
                return
            self._end_abandoned_backward()
            if self._mode is not None and self._uses:
                self._last_uses[self._mode] = self._uses
            self._mode, self._uses = torch.is_grad_enabled(), []
            order = self._last_uses.get(self._mode)
            if order is None:
                order = list(range(len(self.units)))
                order += order[::-1] if self._mode else []
            if not self._mode:
                order = order + order  # evaluation and generation go on with the next pass
            for window in self._windows():
                window.start(order)

    @contextlib.contextmanager
    def one_pass(self):
        """What begins within it, with gradients, is one pass together: units that are released stay until another one
        is wanted."""
        self.begin_forward()
        self._joined = True
        try:
            yield
        finally:
            with self._turn:
                self._joined = False
                self._drop_lingering()

    def summed_later(self, param):
        """Whether its gradient comes in more parts than there are batches, until the pass together ends: that of one
        that several units use."""
        return self._joined and id(param) in self.shared

    def gather(self, unit):
        """Its parameters have values until release(), which each gather() needs."""
        with self._turn:
            if unit in self._lingering:
                self._lingering.discard(unit)
            elif self._holds[unit] == 0:
                self._drop_lingering()
                self._uses.append(unit)
                begin = time.monotonic()
                try:
                    for window in self._windows():
                        for index, data in window.get(unit):
                            self._fill(index, data)
                except BaseException:
                    self._let_go_of(unit)
                    raise
                self.waited_s += time.monotonic() - begin
            self._wait_copied(unit)
            self._holds[unit] += 1

    def release(self, unit):
        with self._turn:
            if self._holds[unit] == 0:
                return  # an update came in between
            self._holds[unit] -= 1
            if self._holds[unit] == 0 and self._joined:
                self._lingering.add(unit)
            elif self._holds[unit] == 0:
                self._let_go_of(unit)

    def read_experts(self, indices, rows):
        """Of parameters that have an expert in each row, whose unit is held: these rows have values."""
        with self._turn:
            begin = time.monotonic()
            for index in indices:
                if index not in self._rows:
                    continue  # of a copy of the module
                there = self._rows[index]
                for row in sorted(set(rows) - there):
                    for window in self._windows():
                        window.read_row(index, row, self.params[index].data[row])
                    there.add(row)
            self.waited_s += time.monotonic() - begin

    def enter_backward(self, units):
        """A backward pass comes to these units: it holds them, and no others, until it comes to the next or ends."""
        with self._turn:
            units = frozenset(units)
            if units <= self._in_backward and all(self._holds[unit] > 0 for unit in units):
                return
            if not self._in_backward:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            leave = self._in_backward - units
            self._in_backward = frozenset(unit for unit in self._in_backward & units if self._holds[unit] > 0)
            for unit in leave:
                self.release(unit)
            for unit in sorted(units - self._in_backward):
                self.gather(unit)
                self._in_backward |= {unit}

    def _end_backward(self):
        with self._turn:
            units, self._in_backward = self._in_backward, frozenset()
            for unit in units:
                self.release(unit)

    def _end_abandoned_backward(self):
        """One that raised has not ended."""
        if self._in_backward and current_backward() == -1:
            self._end_backward()

    def index_of(self, param, otherwise=None):
        """Of a streamed parameter; `otherwise`: it is none of this stream."""
        stream, index = getattr(param, "_smartinf", (None, None))
        return index if stream is self else otherwise

    def read(self, index):
        """A copy of a parameter's values. Errors: UsageError where nothing holds them any more."""
        unit = self.unit_of[index]
        with self._turn:
            if not any(index in window.firsts for window in self._windows()):
                raise UsageError(f"parameter {self.names[index]} has no values: another optimizer was made without it")
            self.gather(unit)
            try:
                if index in self.experts:
                    self.read_experts([index], range(self.params[index].shape[0]))
                return self.params[index].detach().clone()
            finally:
                self.release(unit)

    def move_to(self, device):
        """The model computes on another device from now on."""
        with self._turn:
            if device == self.device:
                return
            self._let_go()
            for window in self._windows():
                window.moved()
            self._absent.clear()
            self.device = device
            for index, param in enumerate(self.params):
                self.put(index, param, Place.HERE)
                self._empty(index)

    # ---- Around the forward of a module.

    def before_forward(self, own):
        held, saving = [], None
        try:
            for unit in own.units:
                self.gather(unit)
                held.append(unit)
            if torch.is_grad_enabled():
                saving = self._saving()
                saving.__enter__()
        except BaseException:
            for unit in held:
                self.release(unit)
            raise
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        self._entered.stack.append((own, saving))

    def after_forward(self, own, output):
        stack = getattr(self._entered, "stack", None)
        if not stack or stack[-1][0] is not own:
            return None  # before_forward() failed
        try:
            # What a module returns of its weights is not there any longer than they are.
            if any(self.saved_as(tensor) is not None for tensor in tensors_in(output)):
                output = mapped(output, lambda t: t if self.saved_as(t) is None else t.clone())
        finally:
            self._leave(*stack.pop())
        if own.is_block and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: self.enter_backward(own.units))
        return output

    def _leave(self, own, saving):
        if saving is not None:
            saving.__exit__(None, None, None)
        for unit in own.units:
            self.release(unit)

    # ---- Whatever else uses a parameter.

    def use(self, tensor, name, written):
        if written:
            self._refuse(
                tensor,
                "to be written. Write it before the model is streamed (load_state_dict, resize_token_embeddings, merging, "
                "adapters that begin with a part of it), and stream it then",
            )
        if name == "data_ptr" and _is_handle(tensor):
            self._refuse(tensor, "asked for its memory. Take a copy first: tensor.clone(), or use save_pretrained()")
        if name in POINTERS:
            with torch._C.DisableTorchFunctionSubclass():
                return tensor.detach()
        values = self.read(tensor._smartinf[1])
        if torch.is_grad_enabled() and name != "detach" and tensor.requires_grad:
            # Whoever only looks, as adapters do when they are made, calls no backward.
            values.requires_grad_()
            values.register_hook(lambda _: self._refuse_gradient(tensor))
        return values

    def data(self, tensor):
        """What stands for param.data, and for the parameter in a state dict: values are read when they are used, and
        writes are refused."""
        stand_in = getattr(tensor, "_smartinf_stand_in", None)
        if stand_in is None:
            # Of one parameter all have one storage, by which shared tensors are known.
            stand_in = without_values(tensor.shape, tensor.dtype, tensor.device)
            stand_in.untyped_storage().resize_(tensor.itemsize)
            tensor._smartinf_stand_in = stand_in
        made = torch.Tensor._make_subclass(absent_class(torch.Tensor), stand_in)
        made._smartinf = tensor._smartinf
        return made

    def whole(self, tensor):
        # Of a whole model the model refuses it; a module that is trained in place of one has its copy in memory.
        values = self.read(tensor._smartinf[1])
        return values if _is_handle(tensor) else torch.nn.Parameter(values, tensor.requires_grad)

    def described(self, tensor):
        name = self.names[tensor._smartinf[1]]
        return f"Parameter containing:\n({name}: {list(tensor.shape)}, {tensor.dtype}, not in memory)"

    def _refuse(self, tensor, what):
        raise UsageError(f"parameter {self.names[tensor._smartinf[1]]} is not in memory and was {what}.")

    def _refuse_gradient(self, tensor):
        self._refuse(
            tensor,
            "used outside of the forward of the module that holds it, where its gradient would be lost. Read it "
            "under torch.no_grad(), freeze it, or name the modules that use it as blocks: layers=[...]",
        )

    # ---- What autograd saves.

    def _saving(self):
        """What autograd saves of the weights is found again in backward, wherever they are then. The rest goes the way
        that it would have gone: to the hooks that were there before, such as those of gradient checkpointing."""
        outer_pack, outer_unpack = top_saved_tensors_hooks() or (None, None)

        def pack(tensor):
            saved = self.saved_as(tensor)
            if saved is not None:
                return _WEIGHT, saved
            if outer_pack is not None:
                return _OUTER, outer_pack(tensor)
            # Detached: a tensor that its own graph keeps would never be freed.
            return tensor._version, tensor.detach()

        def unpack(packed):
            how, what = packed
            if how is _WEIGHT:
                return self.restore(what)
            if how is _OUTER:
                return outer_unpack(what)
            check_version(what, how, what.shape, what.dtype)
            return what

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def saved_as(self, tensor):
        """What stands for a tensor that shares memory with a parameter; None: it does not."""
        if not self._by_storage or tensor.layout is not torch.strided:
            return None
        index = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if index is None:
            return None
        rows = frozenset(self._rows.get(index, ()))
        where = tensor.storage_offset(), tensor.size(), tensor.stride()
        return _SavedView(index, tensor.dtype, *where, rows, self._generation)

    def restore(self, saved):
        with self._turn:
            is_trained = self._trained is not None and saved.index in self._trained.firsts
            if is_trained and saved.generation != self._generation:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"parameter {self.names[saved.index]} was updated by step() since this forward. Compute the forward "
                    "again after step()."
                )
            self.enter_backward([self.unit_of[saved.index]])
            self._wait_copied(self.unit_of[saved.index])
            if saved.rows:
                self.read_experts([saved.index], saved.rows)
            storage = self.params[saved.index].untyped_storage()
            tensor = torch.empty(0, dtype=saved.dtype, device=self.device)
            return tensor.set_(storage, saved.offset, saved.size, saved.stride)

    # ---- Parts.

    def _wait_copied(self, unit):
        """Whoever has brought the unit may compute on another stream."""
        for window in self._windows():
            window.wait_copied(unit)

    def _windows(self):
        return [window for window in (self._trained, self._read_only) if window is not None]

    def _let_go(self):
        self._end_abandoned_backward()
        self._in_backward = frozenset()
        self._drop_lingering()
        for unit in [unit for unit, count in self._holds.items() if count > 0]:
            self._holds[unit] = 0
            self._let_go_of(unit)

    def _drop_lingering(self):
        while self._lingering:
            self._let_go_of(self._lingering.pop())

    def _let_go_of(self, unit):
        written = [i for window in self._windows() for i in window.release(unit) if self._release(i)]
        # With a block's weights go its own tensors, which leave as much or more to the heap.
        self._freed.freed(self.units[unit].elements * self.dtype.itemsize)
        if written:
            raise UsageError(
                f"parameter {self.names[written[0]]} was written while its module computed, and a streamed parameter keeps "
                "nothing of that. Write it before the model is streamed"
            )

    def _fill(self, index, data):
        param = self.params[index]
        if index in self.experts:
            self._rows[index] = set()
        self.put(index, param, Place.HERE)
        param.data = data
        self._versions[index] = param._version
        self._by_storage[data.untyped_storage().data_ptr()] = index

    def _release(self, index):
        """Returns whether somebody has written to it."""
        if index in self.at[Place.AWAY]:
            return False
        param = self.params[index]
        written = self._versions.pop(index, param._version) != param._version
        self._by_storage.pop(param.untyped_storage().data_ptr(), None)
        self._rows.pop(index, None)
        self._empty(index)
        return written

    def _empty(self, index):
        param = self.params[index]
        if index not in self._absent:
            self._absent[index] = without_values(param.shape, param.dtype, self.device)
        param.data = self._absent[index]
        self.put(index, param, Place.AWAY)


# rows: of a parameter with experts, those that had values. generation: of its values.
_SavedView = collections.namedtuple("_SavedView", ["index", "dtype", "offset", "size", "stride", "rows", "generation"])


# What a module's forward needs. is_block: it may be computed again in backward.
_Own = collections.namedtuple("_Own", ["units", "is_block"])


def _expert_hook(stream, module, indices):
    signature = inspect.signature(module.forward)

    @torch.compiler.disable
    def read(_, args, kwargs):
        chosen = signature.bind(*args, **kwargs).arguments["top_k_index"]
        stream.read_experts(indices, [row for row in chosen.unique().tolist() if row < module.num_experts])

    return read


def _is_handle(tensor):
    return not isinstance(tensor, torch.nn.Parameter)


def _set_to_itself(param):
    """Makes param.set_(param), as torch's parametrizations call it around each forward, what it says: nothing. torch
    counts it as a write."""
    param.set_ = lambda source, *more: param if source is param else torch.Tensor.set_(param, source, *more)
