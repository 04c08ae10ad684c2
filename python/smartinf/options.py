"""The keywords of an optimizer, checked, for as long as it lives; see StorageOptimizer for what they mean."""

import logging
import weakref

import torch

from smartinf import compression, sharded_parameters
from smartinf.errors import UsageError
from smartinf.ranks import Ranks
from smartinf.sizes import parse_bytes
from smartinf.storage_options import complete, device_list, is_remote, remote_options

_log = logging.getLogger("smartinf")
_BYTES = ("memory_budget", "gradient_budget", "state_cache")


class Options:
    """given: the keywords of StorageOptions. core: what the core is made with, but for what depends on the
    parameters. state_keys: torch's names of the planes of state. counts_steps: whether torch does."""

    def __init__(self, given, rule, state_keys, counts_steps, streamed=None, mesh=None, tables=None):
        """Of the parameters, or None: streamed, their StreamedModel; mesh, over which they are divided; tables, the Tables
        of their model."""
        self.mesh, self.tables = mesh, tables
        if tables is not None:
            tables.reject_open()
            if not device_list(given.get("devices")) and tables.devices:
                given = {**given, "devices": tables.devices}
        self.streamed, self.stream = streamed, None if streamed is None else streamed.stream
        given = complete(given if streamed is None else _for_streamed(given, streamed))
        _check(given)
        self.rule, self.state_keys, self.counts_steps = rule, state_keys, counts_steps
        self.compress = compression.parse(given["compress"])
        if self.compress is not None and given["nonfinite"] == "apply":
            raise UsageError(
                'nonfinite="apply" does not go together with compress, whose residual would carry the '
                'infinity into all later steps; choose "raise" or "skip"'
            )
        self.release = bool(given["release_gradients"])
        self.accumulation_steps = int(given["accumulation_steps"])
        self.gradient_type = given["gradient_type"]
        self.resume, self.max_grad_norm, self.nonfinite = given["resume"], given["max_grad_norm"], given["nonfinite"]
        group = given["process_group"]
        self.ranks = Ranks(group if mesh is None else sharded_parameters.process_group(mesh, group))
        if self.release and self.ranks.together and mesh is None:
            self.ranks.make_reduce_group()
        self.devices = [self.ranks.device(device) for device in device_list(given["devices"])]
        remote = remote_options(given["remote"])
        self.remote = remote if any(map(is_remote, self.devices)) else {}
        self.core = {
            "rule": rule,
            "remote": self.remote,
            **{key: given[key] for key in ("state_format", "master", "durability", "where")},
            **{key: int(given[key]) for key in ("subgroup_elements", "seed")},
            "checksums": bool(given["checksums"]),
            **{f"{key}_bytes": parse_bytes(given[key], key) for key in _BYTES if given[key] is not None},
        }
        if streamed is not None:
            self.core["gradient_room"] = True  # a later process may have less memory
        if self.ranks.world > 1:
            self.core["ranks"] = self.ranks.core
        if self.compress is not None:
            self.core["compress"] = self.compress
        self.overlap, model = _overlap(given)
        # Weakly: a model that nobody else holds is of no use to an optimizer.
        self.model = None if model is None else weakref.ref(model)
        if self.overlap is not None and (self.ranks.world > 1 or mesh is not None):
            raise UsageError(
                "overlap works in one process with whole parameters: several ranks exchange their new weights in step(), "
                "or with FSDP2 at the beginning of forward, all of them at once. Leave it out."
            )
        if self.stream is not None and self.ranks.world > 1:
            raise UsageError("a streamed model is trained by one process; start it without torchrun")
        self._warned = set()

    def warn_once(self, about, text, *args):
        if about not in self._warned:
            self._warned.add(about)
            _log.warning(text, *args)

    def never_warn(self, about):
        self._warned.add(about)


def _for_streamed(given, streamed):
    """The keywords as a streamed model needs them, also where all of it stays in memory, so that a script does not depend
    on that. Errors: UsageError for what does not go together."""
    budgets = {"memory_budget": streamed.plan.engine_bytes, "gradient_budget": streamed.plan.gradient_bytes}
    made = budgets | {key: value for key, value in given.items() if value is not None} | {"release_gradients": True}
    if not device_list(given.get("devices")):
        made["devices"] = streamed.devices
    given = complete(made)
    if streamed.stream is None:
        return made
    streamed.close_deleted_optimizer()
    if streamed.stream.has_open_optimizer:
        raise UsageError(
            "the streamed model has an optimizer already. One optimizer takes all of its parameters, in groups if they "
            "differ; close() the other one first if this one is to go on in its place"
        )
    if given["accumulation_steps"] > 1:
        _log.info(
            "accumulation over a streamed model: batch by batch all weights pass twice for each of %d batches, and f32 sums "
            "of all gradients stay in memory; smartinf.forward_backward() and smartinf.hf.StreamedTrainer pass them twice a "
            "step, and keep a block's sums",
            given["accumulation_steps"],
        )
    for name, value in (("compress", None), ("where", "device")):
        if given[name] != value:
            raise UsageError(f"{name}={given[name]!r} does not go together with a streamed model; leave it out")
    overlap, model = given["overlap"], given["model"]
    if overlap not in (None, "none", "late") or model is not None and overlap is None:
        raise UsageError(
            "overlap of a streamed model is always late: its units wait for their own new weights. Leave it out"
        )
    return made | {"overlap": None, "model": None}


def _overlap(given):
    """(None, "late", "early" or "auto"; the model)."""
    overlap, model = given["overlap"], given["model"]
    if isinstance(overlap, torch.nn.Module) and model is None:
        return "late", overlap
    if overlap is None or overlap == "none":
        if model is not None and overlap is None:
            raise UsageError('model= is for overlap: say overlap="late", "early" or "auto"')
        return None, None
    if overlap not in ("late", "early", "auto"):
        given_as = repr(overlap) if isinstance(overlap, (str, bool)) else type(overlap).__name__
        raise UsageError(
            f'overlap={given_as}: known are "none", "late", "early" and "auto", with model=model, or the model '
            "itself, overlap=model"
        )
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f'overlap="{overlap}" needs the model whose modules wait for their new weights: model=model'
        )
    if overlap == "early" and not given["release_gradients"]:
        raise UsageError(
            'overlap="early" needs release_gradients=True: an update beside backward takes each gradient as soon as '
            "it is complete"
        )
    return overlap, model


def _check(given):
    for name in ("capturable", "differentiable"):
        if given[name]:
            raise UsageError(
                f"{name}={given[name]!r} is not supported: a step leaves the GPU and the autograd graph. "
                "Leave it out."
            )
    if not device_list(given["devices"]):
        raise UsageError(
            'no device given: say where the state is to live, e.g. devices=["/nvme/run1"]. A '
            "directory is made if it is missing."
        )
    clip, passes = given["max_grad_norm"], given["accumulation_steps"]
    if clip is not None and not float(clip) >= 0:
        raise UsageError(f"max_grad_norm={clip!r} must be positive, or 0 or None, which clip nothing")
    if passes < 1 or int(passes) != passes:
        raise UsageError(f"accumulation_steps={passes!r} must be a positive integer")
