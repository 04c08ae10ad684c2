"""smartinf.DeviceCache: keys and values of transformers' generate, in memory or on devices, which attend to them.

A cache of transformers hands all keys and values to the model for every token. This one hands out the new ones only, and
is asked for attention instead, by the attention function "smartinf", which this module registers."""

import bisect
import contextlib
import itertools
import os
import weakref

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from smartinf import _core
from smartinf.errors import CorruptError, Error, MemoryLimitError, NoSpaceError, UsageError
from smartinf.layout import TYPE_NAMES
from smartinf.sizes import parse_bytes
from smartinf.storage_options import device_list, is_remote, remote_options

NAME = "smartinf"
_BLOCK_TOKENS = 32
_DEVICE_BYTES = 64 << 20  # of each device, for reading and writing
_CHECKED = 1 << 24  # numbers of a mask that are looked at together
_BEYOND = ("s_aux", "sinks", "position_bias", "indices", "block_indices")  # what attention functions of some models take


class DeviceCache(Cache):
    """Keys and values of the texts that `model.generate` continues, on devices that attend to them: of each token and
    layer a query goes there, and the weighted values come back. Without devices they are in memory, where a token costs
    no copy of what is there.

        cache = smartinf.DeviceCache(model, devices=["/nvme0/kv"], format="bf16")
        model.set_attn_implementation("smartinf")
        model.generate(**inputs, past_key_values=cache, max_new_tokens=256)
        cache.reset()  # for other texts; close() gives the devices back

    model: of transformers, whatever is generated with: resident, from smartinf.from_pretrained(), or PEFT's over one.
    devices: directories, one for each drive, or grpc:// devices; None: in memory. Each text (a row of the batch) lies
        on one of them. Nothing but the drive's measured rates is left there after close(), `with`, or the end of the
        process.
    memory: bytes (or "4GB"). Without devices for keys and values, None: three quarters of what is free. With devices
        for what they read ahead and write, None: 64 MiB each.
    format: "bf16", "f32" or "q8" (a byte for a number, a scale for each row); None: bf16 for a model of that type,
        else f32.
    max_length: tokens of a text, at most, padding included, for which room is reserved; None: the model's positions,
        in memory as many of them as there is room for.
    remote: for grpc:// devices, as an optimizer takes it.
    threads: that attend in memory. None: as many as torch has, as far as there are cores beside torch's, whose threads
        keep theirs busy for a while after each product; at least one.

    The prompt is computed by torch's scaled_dot_product_attention and then appended. Tokens that come one by one, and
    further prompts on a cache that is not empty, are attended to where keys and values are: the answers have the same
    bits in memory, on any devices and on any number of them. A model on a GPU gives new keys and values and queries to
    the host, and gets answers back: a few KB for each token and layer.

    Rows of a batch may be padded. `batch_select_indices(rows)` keeps these rows, in this order.

    Errors: UsageError for what cannot be done, which names what to use in its place: beam search, assisted decoding,
    gradients, attention with sinks, chunks or a bias, another model's shape; NoSpaceError and MemoryLimitError with what
    is needed and free; CorruptError for a block that is not what was written; DeviceError. After an error of a forward
    call reset(), and give the whole text again."""

    def __init__(self, model, devices=None, *, memory=None, format=None, max_length=None, remote=None, threads=None):
        super().__init__(layers=[])
        self._config, self._windows = _decoder(model)
        config, listed = self._config, device_list(devices)
        self._heads, self._kv_heads, self._width = _heads(config)
        self._softcap = float(getattr(config, "attn_logit_softcapping", None) or 0)
        if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
            raise UsageError(f"max_length={max_length!r} is no number of tokens")
        if threads is None:
            threads = max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) - torch.get_num_threads() + 1))
        elif not isinstance(threads, int) or threads < 1:
            raise UsageError(f"threads={threads!r} is no number of threads")
        self.max_length = max_length
        self._in_memory = not listed
        if memory is not None:
            self._memory = parse_bytes(memory, "memory")
        else:
            self._memory = len(listed) * _DEVICE_BYTES or _core.available_memory_bytes() // 4 * 3
        if format is None:
            format = "bf16" if model.dtype == torch.bfloat16 else "f32"
        for device in listed:
            if not is_remote(device):
                os.makedirs(device["path"], exist_ok=True)
        self._core = _core.Cache(
            {"devices": listed, "remote": remote_options(remote)}, self._windows, self._heads, self._kv_heads, self._width,
            self._softcap, format, self._memory, threads,
        )  # fmt: skip
        self._finalizer = weakref.finalize(self, _close, self._core, os.getpid())
        self._numbers = itertools.count()
        self._ids = []  # a sequence of the core for each row
        self.reset()

    # ---- What transformers asks a cache.

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Returns what it is given; the attention function, which comes next, appends it."""
        if self._config._attn_implementation != NAME:
            raise UsageError(
                f"the model's attention is {self._config._attn_implementation!r}, and a DeviceCache has to be asked for it: "
                'call model.set_attn_implementation("smartinf"), or, where that changes nothing, leave past_key_values out'
            )
        if layer_idx >= len(self) or not self._fits(key_states) or key_states.shape != value_states.shape:
            raise UsageError(
                f"keys {list(key_states.shape)} and values {list(value_states.shape)} of layer {layer_idx}: this cache was "
                f"made for {len(self)} layers with {self._kv_heads} heads of {self._width}, alike for keys and values. Make "
                "one for this model, DeviceCache(model); for layers that differ use transformers' DynamicCache"
            )
        count = key_states.shape[2]
        behind = [self._seen[0] - count] if layer_idx > 0 else self._seen
        if self._awaited is not None or self._failed or any(seen != self._seen[layer_idx] for seen in behind):
            raise UsageError(
                "an earlier call has failed within the model, or its attention was another one than "
                '"smartinf": call reset(), and give the whole text again'
            )
        if layer_idx == 0:
            self._begin(len(key_states), count)
        given = key_states.view_as(key_states)
        given._smartinf_cache = self
        self._awaited = layer_idx
        return given, value_states

    def get_seq_length(self, layer_idx=0):
        return self._seen[layer_idx]

    def get_mask_sizes(self, query_length, layer_idx):
        return self._seen[layer_idx] + query_length, 0

    def get_max_length(self, layer_idx=None):
        return self.max_length or -1

    def __len__(self):
        return len(self._windows)

    def __repr__(self):
        return f"DeviceCache({len(self._ids)} rows of {self._seen[0]} tokens)"

    is_sliding = is_linear = is_dummy = property(lambda self: [False] * len(self))
    is_croppable = property(lambda self: False)
    batch_size = property(lambda self: len(self._ids) or -1)

    def batch_select_indices(self, indices):
        """Only these rows stay, in this order: numbers, or one bool for each row."""
        rows = torch.arange(len(self._ids))[torch.as_tensor(indices).cpu()].tolist()
        if len(set(rows)) < len(rows):
            raise UsageError("batch_select_indices: a row can stay once only; give the prompt anew for each of its answers")
        for row in set(range(len(self._ids))) - set(rows):
            self._core.drop(self._ids[row])
        self._ids, self._kept = [self._ids[row] for row in rows], self._kept[rows]
        if not rows:
            self.reset()

    def reset(self):
        """Forgets all texts. The devices stay open."""
        for number in self._ids:
            self._core.drop(number)
        self._ids = []
        self._seen = [0] * len(self)  # tokens of a row in each layer, padding included
        self._kept = torch.ones(0, 0, dtype=torch.bool)  # [rows][tokens], those that are not padding
        self._awaited = None  # the layer whose attention comes next
        self._failed = False

    def reorder_cache(self, beam_idx):
        _refuse("beam search", "num_beams=1, or transformers' DynamicCache")

    def batch_repeat_interleave(self, repeats):
        _refuse("way to repeat rows", "num_return_sequences=, or repeat the prompt")

    def crop(self, tokens_to_remove):
        _refuse("way to take tokens back", "reset(), and the whole text again")

    def activate_past_recording(self):
        _refuse("assisted decoding", "generate() without an assistant or prompt lookup, or transformers' DynamicCache")

    def __reduce__(self):
        _refuse("copy", "another DeviceCache, and the whole text again")

    # ---- Its own.

    def close(self):
        """Frees its memory and the devices. It cannot be used any more."""
        if self._finalizer.detach():
            self._core.close()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.close()

    def traffic(self):
        """Bytes that the drives of this machine's devices have "read" and "written"."""
        return self._core.traffic()

    def _fits(self, keys):
        return keys.dim() == 4 and keys.shape[1] == self._kv_heads and keys.shape[3] == self._width

    def _begin(self, rows, count):
        """A forward call begins, of so many tokens for each row."""
        if not self._ids:
            self._open(rows)
        if rows != len(self._ids):
            raise UsageError(f"a batch of {rows} on a cache of {len(self._ids)} rows: call reset() before other texts")
        if self._seen[0] + count > self._room:
            raise UsageError(
                f"a text of {self._seen[0] + count} tokens, and the cache has room for {self._room}: give more by "
                "max_length= or, in memory, by memory= or fewer rows at once"
            )
        self._new = None  # as _kept, of this call's tokens
        self._checked = []  # masks of this call, with the window each was checked for

    def _open(self, rows):
        room = self.max_length or getattr(self._config, "max_position_embeddings", None) or 1 << 20
        if self.max_length is None and self._in_memory:
            blocks = range(1, -(-room // _BLOCK_TOKENS) + 1)
            fit = bisect.bisect_right(
                blocks, self._memory // rows, key=lambda count: self._core.sequence_bytes(count * _BLOCK_TOKENS)
            )
            room = min(room, max(fit, 1) * _BLOCK_TOKENS)
        made = []
        try:
            for number in itertools.islice(self._numbers, rows):
                self._core.open(number, room)
                made.append(number)
        except Error as error:
            for number in made:
                self._core.drop(number)
            if isinstance(error, (NoSpaceError, MemoryLimitError)):
                error.add_note(
                    f"for row {len(made) + 1} of {rows}, of up to {room} tokens: give max_length=, a smaller format=, "
                    "fewer rows at once, or more devices= or memory="
                )
            raise
        self._ids, self._room, self._kept = made, room, torch.ones(rows, 0, dtype=torch.bool)

    def _attend(self, module, query, key, value, mask, scaling, softcap):
        layer, self._awaited = self._awaited, None
        rows, heads, count, width = query.shape
        if layer is None or value.shape != key.shape:
            _refuse("attention of two parts", "transformers' DynamicCache and another attn_implementation")
        if heads != self._heads or key.dtype not in TYPE_NAMES:
            raise UsageError(
                f"{heads} heads of queries and keys of {key.dtype}: the cache was made for {self._heads} heads of float32, "
                "bfloat16 or float16; make one for this model, DeviceCache(model)"
            )
        if (softcap or 0) != self._softcap:
            raise UsageError(f"a softcap of {softcap}, and the cache was made for {self._softcap}: make one for this model")
        self._check_mask(mask, layer, count)
        scaling = width**-0.5 if scaling is None else scaling
        self._failed = True
        try:
            if count > 1 and self._seen[layer] == 0:
                out = _prompt_attention(module, query, key, value, mask, scaling, softcap)
                keys, values = (given.transpose(1, 2).cpu().contiguous() for given in (key, value))
                runs = [
                    (number, row * count + first, end - first)
                    for row, number in enumerate(self._ids)
                    for first, end in _runs(self._new[row])
                ]
                self._append(layer, runs, keys, values)
            else:
                out = self._attend_one_by_one(layer, query.float() * scaling, key, value).to(query)
        except CorruptError as error:
            error.add_note("call reset() on the cache, and give the whole text again")
            raise
        self._failed = False
        self._seen[layer] += count
        if layer == len(self) - 1:
            self._kept, self._checked = torch.cat([self._kept, self._new], 1), []
        return out

    def _append(self, layer, runs, keys, values):
        self._core.append(layer, runs, TYPE_NAMES[keys.dtype], keys.data_ptr(), values.data_ptr())

    def _attend_one_by_one(self, layer, *given):
        """Each token is appended, and then attends. Returns [rows][tokens][heads][width]."""
        queries, keys, values = (tensor.permute(2, 0, 1, 3).cpu().contiguous() for tensor in given)
        out = torch.empty_like(queries)
        for token, new in enumerate(self._new.unbind(1)):
            runs = [(self._ids[row], row, 1) for row in new.nonzero()[:, 0].tolist()]
            self._append(layer, runs, keys[token], values[token])
            self._core.attend(layer, self._ids, queries[token].data_ptr(), out[token].data_ptr())
        return out.transpose(0, 1).contiguous()

    def _check_mask(self, mask, layer, count):
        """That attention is what is folded: over all tokens up to the query's, or the last ones of the layer's window,
        but for padding, the same in all calls. mask: of sdpa_mask(): bool [rows][1][count][tokens], or None."""
        window, first = self._windows[layer], self._seen[layer]
        if any(mask is known and window == of for known, of in self._checked):
            return
        rows, total = len(self._ids), first + count
        new = torch.ones(rows, count, dtype=torch.bool)
        if mask is None:
            fits = bool(self._kept.all()) and not 0 < window < total
        elif fits := mask.dtype == torch.bool and mask.shape == (rows, 1, count, total):
            new = mask[:, 0].diagonal(first, 1, 2).cpu()
            kept = torch.cat([self._kept, new], 1)
            if window and bool((kept[:, :-1] & ~kept[:, 1:]).any()):
                _refuse("padding inside of a text or behind it, with windows", "padding_side='left', or each text alone")
            fits = _is_causal(mask[:, 0], kept, first, window)
        if not fits or (self._new is not None and not torch.equal(new, self._new)):
            raise UsageError(
                f"the attention mask of layer {layer} is not that of a text that is continued: a token sees "
                f"{f'the last {window}' if window else 'all'} tokens up to itself but for padding, which is the same in every "
                'call. Give the attention_mask of the whole text; for another attention use transformers\' DynamicCache'
            )
        self._new = new
        self._checked.append((mask, window))


def _is_causal(mask, kept, first, window):
    """mask: [rows][count][tokens], of queries from `first` on; kept: [rows][tokens]."""
    rows, count, total = mask.shape
    kept, tokens = kept.to(mask.device), torch.arange(total, device=mask.device)
    for queries in torch.arange(first, total, device=mask.device)[:, None].split(max(1, _CHECKED // (rows * total))):
        seen = tokens <= queries
        if window:
            seen &= tokens > queries - window
        if not torch.equal(mask[:, :len(queries)], seen & kept[:, None]):
            return False
        mask = mask[:, len(queries):]
    return True


def _attention(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, is_causal=None, **kwargs
):
    """The attention function "smartinf"; key and value are what DeviceCache.update() has returned."""
    cache = getattr(key, "_smartinf_cache", None)
    if cache is None:
        raise UsageError(
            'attn_implementation="smartinf" is for generate(past_key_values=smartinf.DeviceCache(model, ...)), and works '
            'with no other cache, static or dynamic, nor without one: call model.set_attn_implementation("sdpa") for these'
        )
    if torch.is_grad_enabled() and query.requires_grad:
        _refuse("gradients", 'torch.no_grad(), or for training model.set_attn_implementation("sdpa")')
    if dropout:
        _refuse("dropout", "model.eval()")
    beyond = [name for name in _BEYOND if kwargs.get(name) is not None]
    if beyond or is_causal is False or not getattr(module, "is_causal", True):
        what = f"attention with {', '.join(beyond)}" if beyond else "attention to what follows"
        _refuse(what, "transformers' DynamicCache and another attn_implementation")
    if kwargs.get("output_attentions"):
        _refuse("attention weights", 'model.set_attn_implementation("eager") and transformers\' DynamicCache')
    return cache._attend(module, query, key, value, attention_mask, scaling, softcap), None


def _prompt_attention(module, query, key, value, mask, scaling, softcap):
    """Returns [rows][tokens][heads][width]."""
    if not softcap:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, is_causal=True)[0]
    rows, heads, count, _ = query.shape
    key, value = (given.repeat_interleave(heads // given.shape[1], 1) for given in (key, value))
    if mask is None:
        mask = torch.ones(1, 1, count, count, dtype=torch.bool, device=query.device).tril()
    out = []
    size = max(1, _CHECKED // (rows * heads * count))
    for some, seen in zip(query.split(size, 2), mask.split(size, 2), strict=True):
        scores = torch.tanh(some @ key.mT * scaling / softcap) * softcap
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        out.append(scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value)
    return torch.cat(out, 2).transpose(1, 2).contiguous()


def _runs(kept):
    """[(first, end)] of the tokens that are kept."""
    edges = torch.nn.functional.pad(kept.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
    return zip(edges[::2], edges[1::2], strict=True)


def _decoder(model):
    """(configuration of the part that writes text, the window of each of its layers; 0: none)."""
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise UsageError(f"model={type(model).__name__}: give a model of transformers, or PEFT's over one")
    if config.is_encoder_decoder:
        _refuse("encoder beside the decoder", "generate() without past_key_values")
    config = config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    others = {type(layer).__name__ for layer in layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    if getattr(config, "attention_chunk_size", None) is not None:
        others.add("attention in chunks")
    if others or not layers:
        _refuse(f"layers of {config.model_type} ({', '.join(sorted(others))})", "transformers' DynamicCache")
    return config, [getattr(layer, "sliding_window", 0) for layer in layers]


def _heads(config):
    """(heads of queries, heads of keys, their width)."""
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or (heads and config.hidden_size // heads)
    if not all(isinstance(number, int) for number in (heads, kv_heads, width)):
        _refuse(f"heads of {config.model_type}, which differ by layer", "transformers' DynamicCache")
    return heads, kv_heads, width


def _close(core, owner):
    if os.getpid() == owner:  # and not in a forked child
        with contextlib.suppress(Error):
            core.close()


def _refuse(what, instead):
    raise UsageError(f"a DeviceCache has no {what}: use {instead}")


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
