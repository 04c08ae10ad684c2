"""A smaller student learns block by block what a teacher's blocks do: distill() and prune()."""

import collections
import contextlib
import copy
import functools
import json
import logging
import math
import os
import pathlib

import torch

from smartinf import _core, streamed_model
from smartinf.errors import UsageError
from smartinf.optimizers import AdamW
from smartinf.process_memory import PAGE, aligned_memory
from smartinf.sizes import parse_bytes
from smartinf.storage_options import device_list, local_paths
from smartinf.units import find_units

_log = logging.getLogger("smartinf")


class Distilled:
    """What distill() has done. losses: {name of a student's block, "head" or "whole": the loss of each step made by this
    call}. computed: {name of a teacher's unit: batches that it has computed}. perplexity: {"teacher", "untrained",
    "distilled": of the evaluation}, empty without one. outputs_on_devices: bytes of block outputs that memory had no room
    for, at most at a time."""

    def __init__(self):
        self.losses = collections.defaultdict(list)
        self.computed = collections.Counter()
        self.perplexity = {}
        self.outputs_on_devices = 0


def distill(
    teacher, student, data, *, devices=None, out=None, lr=1e-4, epochs=1, whole_epochs=0, loss="mse", top_k=64,
    inputs="teacher", blocks=None, evaluation=None, outputs_memory="1GiB", **optimizer,
):  # fmt: skip
    """Trains each block of `student` to return what the teacher's block returns, one block after another. Both are causal
    models of transformers, in memory or streamed (smartinf.stream, smartinf.from_pretrained), of one hidden size and
    vocabulary. A block of the teacher is brought to memory once, for all batches; what it returns is kept once, as what the
    student's block learns and what the teacher's next block is given. The student is changed in place.

    data: batches of one shape: tensors of token ids [rows, length] without padding; a step each. Any sequence that gives
        the same batches each time it is read.
    devices: where the optimizer's state lies, as smartinf.AdamW takes them; also for block outputs beyond outputs_memory.
        None: those of a streamed student. Called again after a crash with the same arguments, the untrained student
        among them, it goes on from the last step, to the same weights; the teacher's blocks are computed again.
    out: a folder that gets the student (save_pretrained). A streamed student has its weights in the optimizer's state,
        which is closed at the end, so it needs one.
    lr: of each unit's first step; falls to 0 with its last one, by a half cosine. optimizer: further keywords of
        smartinf.AdamW, such as betas, weight_decay (0 unless given) or max_grad_norm.
    epochs: times that each unit learns all batches. whole_epochs: times that the student then learns all of them as a whole
        from the teacher's top_k logits, when the teacher is not needed any more.
    loss: of a block, the mean of all tokens: "mse", the square of the distance from the teacher's output over that of the
        output, or "cosine": 1 - the cosine of both. A copy of the teacher has exactly 0.
    top_k: the last unit (norm and head) learns the KL divergence of its next token's probabilities from the teacher's:
        the top_k largest, and the rest as one. 0: it rests. The input embedding always does, also as a tied head.
    inputs: "teacher": each block of the student is given what the teacher's is; "student": what the student's trained
        blocks before it return, with the same targets.
    blocks: of a student of other depth: for each of its blocks the name of the teacher's block whose output it learns, in
        the teacher's order, the last block at the end. None: both have the same number.
    evaluation: batches like those of data, which nobody learns: perplexities before and after.
    outputs_memory: bytes (or "1GiB") for block outputs; what is beyond goes to the devices.

    Returns a Distilled. Errors: UsageError for models that do not fit each other (sizes, vocabularies, tokenizers, depth;
    both are named), for batches of several shapes, and for blocks that are given what depends on the text.
    Source: Pipe-BD, DATE 2023; FitNets, arXiv 1412.6550.
    """
    if loss not in _LOSSES:
        raise UsageError(f"loss={loss!r}: known are {', '.join(map(repr, _LOSSES))}")
    if inputs not in ("teacher", "student"):
        raise UsageError(f'inputs={inputs!r}: known are "teacher" and "student"')
    _check_batches("data", data)
    cut, own = _Cut(teacher, "the teacher"), _Cut(student, "the student")
    _check_alike(cut, own)
    spans = _spans(cut, own, blocks)
    streamed = streamed_model.of(student.parameters())
    if streamed is not None and out is None:
        raise UsageError("a streamed student needs out=: the folder that gets its weights when its optimizer is closed")
    if devices is None and streamed is None:
        raise UsageError("devices= is missing: folders on drives, for the state of the student's optimizer")
    made = Distilled()
    with contextlib.ExitStack() as stack:
        for model in (teacher, student):
            stack.callback(model.train, model.training)
            model.eval()
        for name, model in (("teacher", teacher), ("untrained", student)):
            if evaluation is not None:
                made.perplexity[name] = _perplexity(model, evaluation)
        stack.enter_context(_frozen(own, keep_head=top_k > 0 or whole_epochs > 0))
        named = [(name, param) for name, param in student.named_parameters() if param.requires_grad]
        places = {} if devices is None else {"devices": devices}
        optimizer = {"weight_decay": 0.0, "resume": True, "max_grad_norm": float("inf")} | optimizer
        steps = stack.enter_context(AdamW(named, lr=lr, **places, **optimizer))
        spool = _Spool(device_list(devices) if devices is not None else streamed.devices, stack)
        stores = functools.partial(_Outputs, spool, parse_bytes(outputs_memory, "outputs_memory"), 2 + (inputs == "student"))
        _Distillation(cut, own, data, steps, lr, made, stores, loss, top_k, epochs, whole_epochs).run(spans, inputs)
        made.outputs_on_devices = spool.used_max
        if evaluation is not None:
            made.perplexity["distilled"] = _perplexity(student, evaluation)
        if out is not None:
            student.save_pretrained(out)
    return made


class _Distillation:
    """The loops of distill(), whose arguments it takes; cut, own: teacher and student. stores: makes an _Outputs."""

    def __init__(self, cut, own, data, optimizer, lr, made, stores, loss, top_k, epochs, whole_epochs):
        self._cut, self._own, self._data, self._optimizer, self._lr = cut, own, data, optimizer, lr
        self._made, self._stores, self._loss, self._top_k = made, stores, _LOSSES[loss], top_k
        self._epochs, self._whole_epochs = epochs, whole_epochs
        self._units = 0  # whose steps are numbered so far
        self._next = optimizer.updates

    def run(self, spans, inputs):
        hidden = self._stores()
        for k, ids in enumerate(self._data):
            hidden.put(k, self._cut.embed(ids))
            self._made.computed["embedding"] += 1
        before = hidden
        if inputs == "student":
            before = self._stores()
            for k, ids in enumerate(self._data):
                before.put(k, self._own.embed(ids))
        else:
            self._own.embed(self._data[0])
        for block, span in enumerate(spans):
            targets = hidden
            for theirs in span:
                returned = self._all(self._cut, theirs, targets, self._made.computed)
                if targets is not before:
                    targets.close()
                targets = returned
            self._train(
                self._own.names[block], self._epochs,
                lambda k, b=block, x=before, y=targets: self._loss(self._own.run(b, x.get(k)), y.get(k)),
            )  # fmt: skip
            if inputs == "student":
                after = self._all(self._own, block, before)
                before.close()
                before = after
            else:
                before.close()
                before = targets
            hidden = targets
        if self._top_k == 0:
            return
        top = []
        for k, ids in enumerate(self._data):
            with torch.no_grad():
                top.append(_top_of(self._cut.logits(ids, hidden.get(k)), self._top_k))
            self._made.computed["head"] += 1
        if self._trains_head():
            self._train(
                "head", self._epochs, lambda k: _TopKl.apply(self._own.logits(self._data[k], before.get(k)), *top[k])
            )  # fmt: skip
        for store in {hidden, before}:
            store.close()

        def as_a_whole(k):
            return _TopKl.apply(self._own.model(input_ids=self._own.place(self._data[k]), use_cache=False).logits, *top[k])

        self._train("whole", self._whole_epochs, as_a_whole)

    def _all(self, cut, block, given, computed=None):
        """What a block returns for all batches."""
        returned = self._stores()
        with torch.no_grad(), cut.brought(block):
            for k in range(len(self._data)):
                returned.put(k, cut.run(block, given.get(k)))
                if computed is not None:
                    computed[cut.names[block]] += 1
        return returned

    def _trains_head(self):
        return any(param.requires_grad for param in self._own.others)

    def _train(self, name, epochs, loss_of):
        """The next unit's steps; those of them that a committed step has behind it are not made again."""
        batches = len(self._data)
        count = epochs * batches
        begin, self._units = self._units, self._units + count
        for step in range(max(0, self._next - begin), count):
            for group in self._optimizer.param_groups:
                group["lr"] = self._lr * 0.5 * (1 + math.cos(math.pi * step / count))
            loss = loss_of(step % batches)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._made.losses[name].append(loss.item())
        if self._made.losses[name]:
            first, last = self._made.losses[name][0], self._made.losses[name][-1]
            _log.info("distill: %s: loss %.6g at its first step here, %.6g at its last", name, first, last)


# ---- Models in parts.


class _StandIn(torch.nn.Module):
    """In the place of a block, whose other attributes it has."""

    def __init__(self, block, call):
        super().__init__()
        self.__dict__["of"], self.__dict__["call"] = block, call

    def forward(self, *args, **kwargs):
        return self.call(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.__dict__["of"], name)


class _Cut:
    """A causal model of transformers that is computed part by part. names, blocks: in the model's order. others: parameters
    of none of them, without the input embedding's."""

    def __init__(self, model, what):
        if not hasattr(model, "get_input_embeddings") or not hasattr(model, "base_model"):
            raise UsageError(f"{what} is a {type(model).__name__}: give a causal model of transformers")
        streamed = streamed_model.of(model.parameters())
        blocks = streamed.blocks if streamed is not None else find_units(model).blocks
        self.model, self.what = model, what
        self.names = [name for name, module in model.named_modules() if module in blocks]
        self.blocks = [model.get_submodule(name) for name in self.names]
        self._stream = None if streamed is None else streamed.stream
        within = {id(param) for block in self.blocks for param in block.parameters()}
        within |= {id(param) for param in model.get_input_embeddings().parameters()}
        self.others = [param for param in model.parameters() if id(param) not in within]
        self._given = None

    def place(self, ids):
        return ids.to(self.model.device)

    def embed(self, ids):
        """What the first block is given. What all blocks are given beside hidden states is the same for all batches."""
        given = [None for _ in self.blocks]

        def call(block, hidden, args, kwargs):
            given[block] = (args, kwargs, hidden)
            return hidden

        with torch.no_grad(), self._replaced(call):
            self.model.base_model(input_ids=self.place(ids), use_cache=False)
        if any(each is None for each in given):
            raise UsageError(f"{self.what} has blocks that a forward of {type(self.model).__name__} does not come to")
        beside = [each[:2] for each in given]
        if self._given is None:
            self._given = beside
        elif not all(map(_same, self._given, beside)):
            raise UsageError(
                f"{self.what}'s blocks are given what depends on the text beside hidden states, which "
                f"{type(self.model).__name__} computes for each: it cannot be distilled block by block"
            )
        return given[0][2]

    def run(self, block, hidden):
        """hidden: what a block is given. Returns what it returns: both [rows, length, hidden size]."""
        args, kwargs = self._given[block]
        returned = self.blocks[block](hidden.to(self.model.device, self.model.dtype), *args, **kwargs)
        return returned[0] if isinstance(returned, tuple) else returned

    def logits(self, ids, hidden):
        """[rows, length, vocabulary], of what the last block has returned."""
        hidden = hidden.to(self.model.device, self.model.dtype)
        with self._replaced(lambda *_: hidden):
            return self.model(input_ids=self.place(ids), use_cache=False).logits

    @contextlib.contextmanager
    def brought(self, block):
        """A streamed block's weights stay in memory meanwhile."""
        stream = self._stream
        indices = [] if stream is None else [stream.index_of(param) for param in self.blocks[block].parameters()]
        units = sorted({stream.unit_of[index] for index in indices if index is not None})
        with contextlib.ExitStack() as stack:
            for unit in units:
                stream.gather(unit)
                stack.callback(stream.release, unit)
            yield

    @contextlib.contextmanager
    def _replaced(self, call):
        """call(block, hidden, args, kwargs) is computed in the place of each block."""

        def called(block, *args, **kwargs):
            hidden = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
            return call(block, hidden, args[1:], kwargs)

        places = [(self.model.get_submodule(name.rpartition(".")[0])._modules, name.rpartition(".")[2]) for name in self.names]
        try:
            for block, (modules, name) in enumerate(places):
                modules[name] = _StandIn(self.blocks[block], functools.partial(called, block))
            yield
        finally:
            for block, (modules, name) in enumerate(places):
                modules[name] = self.blocks[block]


def _same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or a == b


@contextlib.contextmanager
def _frozen(own, keep_head):
    """Of the student only blocks, and with keep_head what comes behind them, require gradients."""
    learn = {id(param) for block in own.blocks for param in block.parameters()}
    learn |= {id(param) for param in own.others} if keep_head else set()
    rest = [param for param in own.model.parameters() if param.requires_grad and id(param) not in learn]
    for param in rest:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in rest:
            param.requires_grad_()


# ---- Losses.


def _mse(own, target):
    """Per token, so that a few tokens with huge activations do not decide alone."""
    target = target.to(own.device, torch.float32)
    least = torch.finfo(torch.float32).tiny
    return ((own.float() - target).square().sum(-1) / target.square().sum(-1).clamp(min=least)).mean()


def _cosine(own, target):
    """Half the square of the distance of both directions, which is 1 - cosine, and 0 for the same bits."""
    direction = functools.partial(torch.nn.functional.normalize, dim=-1)
    target = target.to(own.device, torch.float32)
    return 0.5 * (direction(own.float()) - direction(target)).square().sum(-1).mean()


_LOSSES = {"mse": _mse, "cosine": _cosine}


def _top_of(logits, count):
    """The largest of log probabilities and their ids: both [rows, length, count]."""
    top = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]))
    return top.values, top.indices


class _TopKl(torch.autograd.Function):
    """The KL divergence from what _top_of() has returned for the teacher, the mean of all tokens; all tokens but those of
    `ids` are as one. Its gradient is written out, so that it is exactly 0 where both are alike."""

    @staticmethod
    def forward(ctx, logits, target, ids):
        every = logits.float().log_softmax(-1)
        own = every.gather(-1, ids)
        least = torch.finfo(torch.float32).eps
        rest, others = ((1 - logs.exp().sum(-1)).clamp(min=least) for logs in (own, target))
        gradient = every.exp_().mul_((1 - others / rest).unsqueeze(-1))
        gradient.scatter_(-1, ids, own.exp() - target.exp())
        ctx.save_for_backward(gradient.div_(rest.numel()).to(logits.dtype))
        return ((target.exp() * (target - own)).sum(-1) + others * (others.log() - rest.log())).mean()

    @staticmethod
    def backward(ctx, of_loss):
        return ctx.saved_tensors[0] * of_loss, None, None


def _perplexity(model, batches):
    """exp of the mean cross entropy of next tokens."""
    total = count = 0
    with torch.no_grad():
        for ids in batches:
            ids = ids.to(model.device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
            count += ids[:, 1:].numel()
    return math.exp(total / count)


# ---- Block outputs.


class _Spool:
    """Room for block outputs on devices, which is opened when it is first needed. stack: closes it."""

    def __init__(self, devices, stack):
        self._devices, self._stack, self._core = devices, stack, None
        self.used = self.used_max = 0

    def put(self, values):
        """Returns (ticket, bytes)."""
        if self._core is None:
            paths = [os.path.join(path, "outputs") for path in local_paths(self._devices, "block outputs")]
            for path in paths:
                os.makedirs(path, exist_ok=True)
            free = min(os.statvfs(path).f_bavail * os.statvfs(path).f_frsize for path in paths)
            self._core = _core.Spool({"devices": device_list(paths), "spool_bytes": free // 2})
            self._stack.callback(self._core.close)
        room = -(-values.nbytes // PAGE) * PAGE
        memory, address = aligned_memory(room)
        _view(memory, address, values.shape, values.dtype).copy_(values)
        ticket = self._core.put(address, room)
        self._core.wait(ticket)
        self.used += room
        self.used_max = max(self.used_max, self.used)
        return ticket, room

    def get(self, put, shape, dtype):
        memory, address = aligned_memory(put[1])
        self._core.start_get(put[0], address)
        self._core.wait(put[0])
        return _view(memory, address, shape, dtype)

    def drop(self, put):
        self._core.drop(put[0])
        self.used -= put[1]


def _view(memory, address, shape, dtype):
    begin = address - memory.data_ptr()
    size = math.prod(shape) * dtype.itemsize
    return memory[begin : begin + size].view(dtype).reshape(shape)


class _Outputs:
    """What a block has returned for each batch."""

    def __init__(self, spool, memory, stores):
        """memory: bytes for all `stores` that there are at a time."""
        self._spool, self._room = spool, memory // stores
        self._there, self._away = {}, {}

    def put(self, k, values):
        values = values.detach().to("cpu")
        if self._room >= values.nbytes:
            self._room -= values.nbytes
            self._there[k] = values
        else:
            self._away[k] = (self._spool.put(values), values.shape, values.dtype)

    def get(self, k):
        if k in self._there:
            return self._there[k]
        return self._spool.get(*self._away[k])

    def close(self):
        self._there.clear()
        for put, _, _ in self._away.values():
            self._spool.drop(put)
        self._away.clear()


# ---- Checks.


def _check_batches(name, batches):
    if not len(batches):
        raise UsageError(f"{name} has no batches")
    first = batches[0]
    for k in range(len(batches)):
        ids = batches[k]
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
            raise UsageError(f"{name}[{k}] is no tensor of token ids [rows, length]")
        if ids.shape != first.shape:
            raise UsageError(f"{name}[{k}] is {list(ids.shape)} where {name}[0] is {list(first.shape)}: all have one shape")


def _check_alike(cut, own):
    for key, what in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary")):
        theirs, mine = (getattr(each.model.config, key, None) for each in (cut, own))
        if theirs != mine:
            raise UsageError(
                f"the teacher's {what} is {theirs} and the student's {mine}: block by block both have the same. Make the student "
                "with smartinf.prune(teacher, ...), or choose another"
            )
    theirs, mine = _vocabulary(cut.model), _vocabulary(own.model)
    if theirs is not None and mine is not None and theirs[1] != mine[1]:
        raise UsageError(f"the tokenizers of teacher and student differ: {theirs[0]} and {mine[0]}")


def _vocabulary(model):
    """(the file, what is in it) of the tokenizer in the folder that a model was read from, or None."""
    path = pathlib.Path(getattr(model.config, "_name_or_path", "") or "", "tokenizer.json")
    if not path.exists():
        return None
    return path, json.loads(path.read_text(encoding="utf-8"))["model"].get("vocab")


def _spans(cut, own, blocks):
    """For each block of the student, the teacher's blocks whose work it learns."""
    if blocks is None:
        if len(cut.blocks) != len(own.blocks):
            raise UsageError(
                f"the teacher has {len(cut.blocks)} blocks and the student {len(own.blocks)}: say which of the teacher's each of "
                f'the student\'s ends with: blocks=["{cut.names[0]}", ..., "{cut.names[-1]}"]'
            )
        blocks = cut.names
    unknown = [name for name in blocks if name not in cut.names]
    if unknown:
        raise UsageError(f"blocks: the teacher has no block {unknown[0]!r}; its first is {cut.names[0]!r}")
    ends = [cut.names.index(name) + 1 for name in blocks]
    if len(ends) != len(own.blocks) or ends[-1] != len(cut.blocks) or sorted(set(ends)) != ends:
        raise UsageError(
            f"blocks: give each of the student's {len(own.blocks)} blocks one of the teacher's, in the teacher's order, the last "
            f"of them {cut.names[-1]!r}"
        )
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


# ---- Students that are parts of their teacher.

_ROWS = {"gate_proj": "ffn", "up_proj": "ffn", "q_proj": "heads", "k_proj": "keys", "v_proj": "keys"}
_COLUMNS = {"down_proj": "ffn", "o_proj": "heads"}


def prune(model, data, *, ffn=1.0, heads=1.0):
    """A smaller model of the same kind, with those channels of the feed-forward layers and those groups of heads of `model`
    that matter most: whose activations on `data`, times the weights that read them, are largest.

    model: a causal model of transformers whose blocks have q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj
        (Llama, Qwen, Gemma, Mistral), in memory or streamed. The student is in memory.
    data: batches of token ids [rows, length], as distill() takes them; some thousand tokens are enough.
    ffn, heads: the parts that stay, in (0, 1]. Heads that share keys and values stay or go together, so that `heads` is
        rounded to a number of such groups, at least one.

    Returns a model that transformers saves and loads. Errors: UsageError for other blocks; what transformers says of sizes
    that it does not take. Source: Wanda (arXiv 2306.11695), with whole channels in place of weights.
    """
    import transformers

    for name, part in (("ffn", ffn), ("heads", heads)):
        if not 0 < part <= 1:
            raise UsageError(f"{name}={part}: the part that stays is in (0, 1]")
    cut = _Cut(model, "the model")
    squares = _squares(cut, data)
    old = model.config
    width = getattr(old, "head_dim", None) or old.hidden_size // old.num_attention_heads
    groups = getattr(old, "num_key_value_heads", None) or old.num_attention_heads
    config = copy.deepcopy(old)
    config.intermediate_size = max(1, round(ffn * old.intermediate_size))
    config.num_key_value_heads = max(1, round(heads * groups))
    config.num_attention_heads = config.num_key_value_heads * (old.num_attention_heads // groups)
    config.head_dim = width
    student = transformers.AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    with torch.no_grad():
        kept = [_kept(cut, block, of, config) for block, of in enumerate(squares)]
        for name, target in student.named_parameters():
            value = model.get_parameter(name).detach()
            module, kind = name.split(".")[-2:]
            for block, prefix in enumerate(cut.names):
                if name.startswith(prefix + ".") and module in _ROWS:
                    value = value[kept[block][_ROWS[module]]]
                elif name.startswith(prefix + ".") and module in _COLUMNS and kind == "weight":
                    value = value[:, kept[block][_COLUMNS[module]]]
            if value.shape != target.shape:
                raise UsageError(
                    f"{name} is {list(value.shape)} where a pruned {type(model).__name__} has {list(target.shape)}: "
                    "this kind of model is not pruned"
                )
            target.copy_(value)
    return student.eval()


def _squares(cut, data):
    """For each block {a module of _COLUMNS: the sums of the squares of what it is given, by channel}."""
    sums = [{} for _ in cut.blocks]
    handles = []

    def add(of, key, _, args):
        of[key] = of.get(key, 0) + args[0].float().square().flatten(0, -2).sum(0)

    for of, block in zip(sums, cut.blocks, strict=True):
        for name, module in block.named_modules():
            if name.rpartition(".")[2] in _COLUMNS:
                handles.append(module.register_forward_pre_hook(functools.partial(add, of, name.rpartition(".")[2])))
    try:
        with torch.no_grad():
            for ids in data:
                cut.model.base_model(input_ids=cut.place(ids), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for name, of in zip(cut.names, sums, strict=True):
        if of.keys() != _COLUMNS.keys():
            raise UsageError(f"{name} has no {' and '.join(_COLUMNS)}, by which blocks are pruned")
    return sums


def _kept(cut, block, squares, config):
    """{"ffn", "heads", "keys": indices of the rows that stay}, in their order."""
    weights = {
        name.rpartition(".")[2]: module.weight.detach().float().square().sum(0)
        for name, module in cut.blocks[block].named_modules()
        if name.rpartition(".")[2] in _COLUMNS
    }
    scores = {key: squares[key].cpu() * weights[key].cpu() for key in _COLUMNS}

    def largest(values, count):
        return values.topk(count).indices.sort().values

    def rows(chosen, size):
        return (chosen.unsqueeze(1) * size + torch.arange(size)).flatten()

    group = config.head_dim * config.num_attention_heads // config.num_key_value_heads
    chosen = largest(scores["o_proj"].reshape(-1, group).sum(1), config.num_key_value_heads)
    return {
        "ffn": largest(scores["down_proj"], config.intermediate_size),
        "heads": rows(chosen, group),
        "keys": rows(chosen, config.head_dim),
    }
