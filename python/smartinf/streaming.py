"""Models larger than memory: stream() and from_pretrained()."""

import collections
import contextlib
import copy
import ctypes
import gc
import logging
import os
import warnings
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smartinf import _core, open_optimizers, streamed_model, trainer_arguments
from smartinf.absent_parameter import Absent, without_values
from smartinf.errors import DeviceError, Error, UsageError
from smartinf.layer_stream import LayerStream
from smartinf.layer_window import SLOTS
from smartinf.layout import TYPE_NAMES
from smartinf.modules import give_class
from smartinf.process_memory import FreedMemory, MappedFiles, aligned_memory
from smartinf.sizes import bytes_text, parse_bytes
from smartinf.storage_options import absolute, device_list, local_paths
from smartinf.units import find_units

_log = logging.getLogger("smartinf")
_MAGIC = b"SIWEIGHT"
_WHERE = (
    "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
    "trust_remote_code",
)  # fmt: skip
_watches_optimizers = False
_STRIPE_BYTES = ()  # of the files, where tests want other ones


def stream(model, devices, *, memory_budget=None, layers=None, keep=None):
    """Moves the weights of a model to devices; from then on each of its blocks has its weights in memory only while
    it computes. Returns the model, which stays what it was: its class, names and forward.

    devices: directories on fast drives, as an optimizer takes them. An optimizer of this package that is made with
        the model's parameters keeps its state there as well and needs no devices= of its own.
    memory_budget: bytes (or "24GB") of host memory for weights, gradients on their way and buffers; activations come
        on top. None: half of what is free. What fits stays in memory.
    layers: the model's blocks, where it does not say so itself: a module list's name, or modules.
    keep: bytes of weights that stay in memory; None: what the budget leaves.

    Errors: UsageError for a budget that is too small (with what is needed), a model that is streamed already, and
    one without blocks; NoSpaceError; DeviceError.
    """
    if streamed_model.is_streamed(model):
        raise UsageError("the model is streamed already")
    if open_optimizers.of_parameters(model.parameters()):
        raise UsageError("the model has an optimizer already; stream the model first, and make the optimizer then")
    devices = device_list(devices)
    found = find_units(model, layers)
    paths = _paths(devices)
    for unit in found.units:
        for name, param in unit.params:
            if param.is_meta:
                raise UsageError(
                    f"parameter {name} is on the meta device and has no values yet. Load the model first, or have it "
                    "loaded within the budget: smartinf.from_pretrained(folder, devices=...)"
                )
    dtype = found.units[0].params[0][1].dtype
    plan = _plan(_sizes(found, dtype.itemsize), memory_budget, keep, devices)
    with _WeightsWriter(paths, sum(unit.elements for unit in found.units), dtype) as writer:
        for unit in found.units:
            for _, param in unit.params:
                writer.write(param)
        weights = writer.finish()
        _empty(found)  # whatever fails before, the model is as it was
        return _start(model, found, weights, writer.firsts, devices, plan)


def from_pretrained(path, *, devices, memory_budget=None, auto_class=None, layers=None, keep=None, **kwargs):
    """A model of transformers from a folder or the Hub, streamed, without its weights ever being in memory together.

    auto_class: transformers.AutoModelForCausalLM unless given; any class with from_pretrained(). kwargs: its own, such
    as dtype. The others, and errors: see stream().
    """
    import transformers

    path, devices = _folder(path), device_list(devices)
    maker = auto_class or transformers.AutoModelForCausalLM
    kwargs = dict(kwargs)
    for name in ("device_map", "quantization_config", "tp_plan", "load_in_8bit", "load_in_4bit"):
        if kwargs.get(name) is not None:
            raise UsageError(f"{name} does not go together with streaming: weights have one place. Leave it out.")
    config = kwargs.pop("config", None)
    if config is None:
        # Both look for files, and AutoConfig would keep dtype, also "auto", as the model's.
        types = {name: kwargs.pop(name) for name in ("dtype", "torch_dtype") if name in kwargs}
        again = types | {name: kwargs[name] for name in _WHERE if name in kwargs}
        try:
            config, kwargs = transformers.AutoConfig.from_pretrained(path, return_unused_kwargs=True, **kwargs)
        except (OSError, ValueError) as error:  # ValueError: no name that the Hub could have
            if os.path.exists(path):
                raise
            raise UsageError(
                f"{path}: there is no such folder, and no model of that name can be had from the Hub "
                f"({str(error).strip().partition(chr(10))[0]})"
            ) from error
        kwargs |= again
    trust = {"trust_remote_code": kwargs["trust_remote_code"]} if "trust_remote_code" in kwargs else {}
    try:
        dtype = _dtype_of(kwargs, config) or _dtype_of_files(maker, path, config, kwargs)
        with torch.device("meta"):  # of that type, because what is a unit depends on the bytes
            if hasattr(maker, "from_config"):
                shape = maker.from_config(config, dtype=dtype, **trust)
            else:
                shape = maker._from_config(config, dtype=dtype)
    except ValueError as error:
        if auto_class is not None or not str(error).startswith("Unrecognized configuration class"):
            raise
        named = (config.architectures or ["..."])[0]
        raise UsageError(
            f"{path}: {config.model_type} is no model of {maker.__name__}. Give its class: auto_class=transformers.{named}"
        ) from error
    expected = find_units(shape, layers)
    plan = _plan(_sizes(expected, dtype.itemsize), memory_budget, keep, devices)
    with _WeightsWriter(_paths(devices), sum(p.numel() for p in shape.parameters()), dtype) as writer:
        with _captured(writer, _beside_tied(shape, expected)), _one_tensor_at_a_time():
            model = maker.from_pretrained(path, config=config, **kwargs)
        apart = dict(model.named_parameters()).keys() - dict(shape.named_parameters()).keys()
        if apart:
            raise UsageError(
                f"{path}: by config.json {', '.join(sorted(apart)[:4])} would be tied to another parameter, and the files hold "
                "other values for it. Set tie_word_embeddings to false in config.json, or remove it from the files"
            )
        found = find_units(model, layers)
        if len(found.units) != len(expected.units):
            raise UsageError("the model that was loaded has other blocks than its configuration says")
        for unit in found.units:
            for name, param in unit.params:
                if id(param) not in writer.firsts:
                    # Tied; or not in the checkpoint, as a new classification head, which transformers has just made.
                    writer.write(param)
        weights = writer.finish()
        _empty(found)
        return _start(model, found, weights, writer.firsts, devices, plan)


def _folder(path):
    """A model's folder, or a name on the Hub."""
    there = os.path.expanduser(os.fspath(path))
    return absolute(path) if os.path.exists(there) or there != os.fspath(path) else path


def _paths(devices):
    paths = local_paths(devices, "a streamed model's weights")
    if not paths:
        raise UsageError('no device given: say where the weights are to live, e.g. devices=["/nvme/run1"]')
    for path in paths:
        os.makedirs(path, exist_ok=True)
    return paths


class _WeightsFile:
    """The model's weights on the devices, until an optimizer's state has them, or the process ends."""

    def __init__(self, core, paths, dtype):
        self.core, self._dtype = core, dtype
        self._remove = weakref.finalize(self, _remove_weights, core, paths, os.getpid())

    def read(self, first, values):
        """Elements from `first` on, to a tensor."""
        span, name = [(first, values.numel())], TYPE_NAMES[self._dtype]
        [size] = _core.window_slot_bytes(self.core, span, name, 1)
        _slot, address = aligned_memory(size)
        window = _core.LayerWindow(self.core, span, name, [(address, size)])
        ctypes.memmove(values.data_ptr(), window.get(0), values.numel() * values.itemsize)
        window.close()

    def close(self):
        """Deletes it."""
        self._remove()


def _remove_weights(core, paths, owner):
    if os.getpid() == owner:  # and not in a forked child
        core.close()
        with contextlib.suppress(Error):
            _core.Weights.remove(paths)


class _WeightsWriter:
    """Writes parameters to the devices one after another. firsts: {id of a parameter: its element there}."""

    def __init__(self, paths, elements, dtype):
        """elements: of all that may be given."""
        if dtype not in TYPE_NAMES:
            raise UsageError(f"weights of type {dtype} are not streamed; known are float32, bfloat16 and float16")
        self._paths, self._elements, self.dtype = paths, elements, dtype
        self._weights, self._next = None, 0
        self.firsts = {}

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        if self._weights is not None:  # not finished
            self._weights.close()
            _core.Weights.remove(self._paths)

    def write(self, param):
        if param.dtype != self.dtype:
            raise UsageError(f"a parameter is {param.dtype} where {self.dtype} was expected; give the dtype of the model")
        if self._weights is None:
            self._weights = _create(self._paths, self._elements, TYPE_NAMES[self.dtype])
        values = param.detach().to("cpu").contiguous()
        self._weights.write(self._next, values.data_ptr(), values.numel())
        self.firsts[id(param)] = self._next
        self._next += values.numel()

    def finish(self):
        if self._weights is None:
            raise UsageError("the checkpoint has no weights of the model's parameters")
        zeros = torch.zeros(1 << 20, dtype=self.dtype)
        while self._next < self._elements:  # of parameters that have stayed in memory
            count = min(zeros.numel(), self._elements - self._next)
            self._weights.write(self._next, zeros.data_ptr(), count)
            self._next += count
        weights, self._weights = self._weights, None
        weights.finish()
        return _WeightsFile(weights, self._paths, self.dtype)


def _beside_tied(model, found):
    """Names of the parameters of each module and unit that has one which another module has as well."""
    users = {}
    for module_name, module in model.named_modules():
        named = [(f"{module_name}.{name}".lstrip("."), p) for name, p in module.named_parameters(recurse=False)]
        for _, param in named:
            users.setdefault(id(param), []).append([name for name, _ in named])
    tied = {param for param, modules in users.items() if len(modules) > 1}
    groups = [names for param in tied for names in users[param]]
    groups += [[name for name, _ in unit.params] for unit in found.units if any(id(p) in tied for _, p in unit.params)]
    return {name for names in groups for name in names}


@contextlib.contextmanager
def _captured(writer, left_out):
    """What transformers loads goes to the writer, parameter by parameter, as it is put into its module. left_out: names
    of those that are not captured: transformers looks at the values of what it ties."""

    def note(module, name, submodule):
        places[submodule] = (module, name)

    def name_of(module, name):
        while module in places:
            module, outer = places[module]
            name = f"{outer}.{name}"
        return name

    def take(module, name, param):
        # transformers marks what it has loaded, before it registers it; what is not marked is initialized later.
        loaded = param is not None and not param.is_meta and getattr(param, "_is_hf_initialized", False)
        if not loaded or id(param) in writer.firsts or not param.is_floating_point():
            return
        if param.dtype == writer.dtype and param.numel() > 0 and name_of(module, name) not in left_out:
            alive.append(param)  # its id stays its own
            writer.write(param)
            param.data = without_values(param.shape, param.dtype, param.device)
            files.read(param.nbytes)
            freed.freed(param.nbytes)

    alive, places, files, freed = [], {}, MappedFiles(".safetensors"), FreedMemory()
    hooks = [
        torch.nn.modules.module.register_module_module_registration_hook(note),
        torch.nn.modules.module.register_module_parameter_registration_hook(take),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _one_tensor_at_a_time():
    """transformers reads ahead with threads, as much as there is, unless it is told not to."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _empty(found):
    for unit in found.units:
        for _, param in unit.params:
            param.data = without_values(param.shape, param.dtype, param.device)


def _dtype_of(kwargs, config):
    """The type that from_pretrained() gives most of the weights; None: that of the files."""
    given = kwargs.get("dtype", kwargs.get("torch_dtype", "auto"))
    if given is None or given == "auto":
        given = getattr(config, "dtype", None)
    return getattr(torch, given) if isinstance(given, str) else given


class _FoundType(Exception):
    pass


def _dtype_of_files(maker, path, config, kwargs):
    """What transformers takes where config.json names no type. It finds the files and the type before it makes the
    model, with that type as torch's own: here it ends there, at the model's first parameter."""

    def stop(module, name, param):
        raise _FoundType(torch.get_default_dtype())

    handle = torch.nn.modules.module.register_module_parameter_registration_hook(stop)
    try:
        maker.from_pretrained(path, config=copy.deepcopy(config), **kwargs)
    except _FoundType as found:
        return found.args[0]
    finally:
        handle.remove()
    raise UsageError(f"{path}: the type of its weights cannot be told. Give it, e.g. dtype=torch.bfloat16")


def _create(paths, elements, type_name):
    """Errors: UsageError for a file of that name that is none of ours."""
    for path in paths:
        file = os.path.join(path, "weights")
        if os.path.exists(file):
            with open(file, "rb") as there:
                if there.read(8) not in (_MAGIC, bytes(8), b""):
                    raise UsageError(f"{file} is in the way and holds something else; name another directory")
    try:
        return _core.Weights.create(paths, elements, type_name, "", *_STRIPE_BYTES)
    except DeviceError as error:
        if error.code != "busy":
            raise
        gc.collect()  # a model that was deleted may hold them
        return _core.Weights.create(paths, elements, type_name, "", *_STRIPE_BYTES)


def _start(model, found, weights, firsts, devices, plan):
    for unit in found.units:
        begins = [firsts[id(param)] for _, param in unit.params]
        ends = [firsts[id(param)] + param.numel() for _, param in unit.params]
        if max(ends) - min(begins) != unit.elements:
            raise UsageError(
                f"the tensors of {unit.name} are not together in the checkpoint, so that they cannot be read onto the "
                "devices. Load the model as ever and give it to smartinf.stream(), or save it once with save_pretrained()"
            )
    kept, units, layer_stream = found.units[: plan.kept_units], found.units[plan.kept_units :], None
    with torch.no_grad():
        for _, param in [*found.kept, *(named for unit in kept for named in unit.params)]:
            if id(param) in firsts:
                values = torch.empty(param.shape, dtype=param.dtype)
                weights.read(firsts[id(param)], values)
                param.data = values.to(param.device)
    if units:
        in_order = [firsts[id(param)] for unit in units for _, param in unit.params]
        with_experts = {id(param) for params in found.experts.values() for param in params}
        layer_stream = LayerStream(units, weights, in_order, units[0].params[0][1].device, found.shared, with_experts)
        of_module = {m: [u - len(kept) for u in needed if u >= len(kept)] for m, needed in found.of_module.items()}
        layer_stream.attach(model, {m: needed for m, needed in of_module.items() if needed}, found.blocks, found.experts)
        _take_over(model, layer_stream)
    else:
        weights.close()
    streamed_model.register(model, layer_stream, devices, found, plan)
    sizes = _sizes(found, found.units[0].params[0][1].itemsize)
    _log.info(
        "%s: %d of %d units stay in memory (%d MiB), %d come from the devices through slots of %d MiB",
        type(model).__name__, len(kept), len(found.units), sum(sizes[: len(kept)]) >> 20, len(units),
        _slots(sizes[len(kept) :]) >> 20,
    )  # fmt: skip
    return model


def _sizes(found, itemsize):
    """Bytes of each unit."""
    return [unit.elements * itemsize for unit in found.units]


# Bytes of a budget. kept_units: the first ones, which stay in memory.
_Plan = collections.namedtuple("_Plan", ["engine_bytes", "gradient_bytes", "kept_units"])
_ENGINE_BYTES = 512 << 20  # of buffers, where the budget is large
_ENGINE_BYTES_MIN = 64 << 20  # with one device; each further one needs 5/8 of it for the largest subgroups that a state has


def _slots(sizes):
    """Bytes of the slots for units of these sizes."""
    return sum(_core.slot_sizes(sizes, SLOTS))


def _plan(sizes, memory_budget, keep, devices):
    """What stays in memory, as the trainer's own plan has it: slots and buffers first, then gradients, then the
    weights of the first units. sizes: bytes of each unit. Errors: UsageError where the least does not fit."""
    budget = _core.available_memory_bytes() // 2 if memory_budget is None else parse_bytes(memory_budget, "memory_budget")
    engine = max(min(_ENGINE_BYTES, budget // 8), _ENGINE_BYTES_MIN * (3 + 5 * len(devices)) // 8)
    # Bytes where the first n units stay. The first one is often the largest, and takes its slot with it.
    stays = [sum(sizes[:n]) + _slots(sizes[n:]) for n in range(len(sizes))]
    slots = _slots(sizes)
    least = slots + engine + max(sizes)
    if least > budget:
        others = sorted(sizes)[-2] if len(sizes) > 1 else 0
        raise UsageError(
            f"memory_budget is {bytes_text(budget)}, and at least {bytes_text(least)} are needed: slots of {bytes_text(slots)} "
            f"for units, the largest of {bytes_text(max(sizes))} and the others of up to {bytes_text(others)}, buffers of "
            f"{bytes_text(engine)} and a unit's gradients. Allow more, or name smaller blocks: layers=[...]"
        )
    if keep is None and engine + 2 * sum(sizes) <= budget:
        return _Plan(engine, sum(sizes), len(sizes))  # weights and gradients
    gradients = min(sum(sizes), budget - slots - engine)
    limit = None if keep is None else 0 if keep in (0, "0") else parse_bytes(keep, "keep")
    kept = 0
    while kept < len(sizes) - 1 and (
        stays[kept + 1] <= budget - engine - gradients if limit is None else sum(sizes[: kept + 1]) <= limit
    ):
        kept += 1
    return _Plan(engine, gradients, kept)


# ---- What the model's own methods do while it is streamed.


def _refuse_other_optimizer(optimizer, *_):
    from smartinf.storage_optimizer import StorageOptimizer

    if isinstance(optimizer, StorageOptimizer):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, Absent) and param.grad is not None:
                stream, index = param._smartinf
                raise UsageError(
                    f"{type(optimizer).__name__} cannot train {stream.names[index]}, whose model is streamed: it would "
                    "write to a copy. Use smartinf.AdamW or another optimizer of this package; with Trainer, "
                    "**smartinf.hf.optimizer(args)"
                )


def _take_over(model, layer_stream):
    """The model's own methods know from now on that its weights are elsewhere."""
    global _watches_optimizers
    if not _watches_optimizers:
        register_optimizer_step_pre_hook(_refuse_other_optimizer)
        _watches_optimizers = True
    plain = type(model)
    index_of = layer_stream.index_of

    def _apply(self, fn, recurse=True):
        probe = fn(torch.empty(0, dtype=layer_stream.dtype, device=layer_stream.device))
        if probe.dtype != layer_stream.dtype:
            raise UsageError(
                f"the model is streamed as {layer_stream.dtype} and cannot become {probe.dtype}. Convert it before "
                "smartinf.stream(), or give from_pretrained() the dtype"
            )
        left_out = []
        for module in self.modules():
            for name, param in module._parameters.items():
                if index_of(param) is not None:
                    left_out.append((module, name, param))
                    module._parameters[name] = None
        try:
            plain._apply(self, fn, recurse)
        finally:
            for module, name, param in left_out:
                module._parameters[name] = param
        layer_stream.move_to(probe.device)
        return self

    def state_dict(self, *args, keep_vars=False, **kwargs):
        made = plain.state_dict(self, *args, keep_vars=True, **kwargs)
        for name, value in made.items():
            if not keep_vars and isinstance(value, torch.Tensor):
                made[name] = value.detach() if index_of(value) is None else layer_stream.data(value)
        return made

    def load_state_dict(self, state_dict, *args, **kwargs):
        if trainer_arguments.running("_load_from_checkpoint"):
            # The optimizer's state has the streamed weights, and Trainer loads it next; a wrong one is refused, and
            # another optimizer as well. Frozen ones are those that the model was made with.
            here = plain.state_dict(self, keep_vars=True)
            with torch.no_grad():
                for name, value in state_dict.items():
                    if name in here and index_of(here[name]) is None:
                        here[name].copy_(value)
            return torch.nn.modules.module._IncompatibleKeys([], [])
        raise UsageError(
            "load_state_dict() of a streamed model is not possible: load the weights before smartinf.stream(), or make "
            "the model with smartinf.from_pretrained(folder). A checkpoint of the optimizer has the weights as well"
        )

    def save_pretrained(self, save_directory, *args, max_shard_size="1GB", state_dict=None, **kwargs):
        if state_dict is None:
            state_dict = _meta_state_dict(self, layer_stream)
        with _readable_by_transformers(self, layer_stream):
            return plain.save_pretrained(
                self, save_directory, *args, max_shard_size=max_shard_size, state_dict=state_dict, **kwargs
            )

    def refused(name, advice):
        def method(self, *args, **kwargs):
            raise UsageError(f"{name}() of a streamed model is not possible: {advice}")

        return method

    before = "call it before smartinf.stream(), and stream the model then"
    body = {
        "_apply": _apply,
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
        "__deepcopy__": refused("copy.deepcopy", "its weights have one place"),
        "__reduce_ex__": refused("pickling", "use save_pretrained() or torch.save(model.state_dict())"),
    }
    if hasattr(plain, "save_pretrained"):
        body["save_pretrained"] = save_pretrained
        body["resize_token_embeddings"] = refused("resize_token_embeddings", before)
    give_class(model, body)


def _meta_state_dict(model, layer_stream):
    """A state dict whose streamed tensors are on the meta device: save_pretrained() asks for them one by one."""
    made = model.state_dict()
    for name, value in made.items():
        if layer_stream.index_of(value) is not None:
            made[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return made


@contextlib.contextmanager
def _readable_by_transformers(model, layer_stream):
    """transformers reads what is on the meta device the way that Accelerate's offloading hooks offer it."""

    class Hook:
        class weights_map:
            def __class_getitem__(cls, name):
                return layer_stream.read(model.get_parameter(name)._smartinf[1])

    model._hf_hook, model.hf_device_map = Hook, {"": "cpu"}
    try:
        with warnings.catch_warnings():
            # It says how much memory a shard of 50 GB takes.
            warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
            yield
    finally:
        del model._hf_hook, model.hf_device_map
