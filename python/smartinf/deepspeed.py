"""From a DeepSpeed configuration to the equivalent call here."""

import json

from smartinf.errors import DeviceError, UsageError

_CLASSES = {
    "adamw": "AdamW",
    "adam": "AdamW",  # DeepSpeed's Adam decays as AdamW unless adam_w_mode says otherwise
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "lion": "Lion",
}
_OPTIMIZER_OPTIONS = {
    "AdamW": ("lr", "betas", "eps", "weight_decay"),
    "Adam": ("lr", "betas", "eps", "weight_decay"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "Adagrad": ("lr", "eps", "weight_decay"),
    "Lion": ("lr", "betas", "weight_decay"),
}
# Keys that mean nothing here: they tune DeepSpeed's own buffers, or are part of every step anyway.
_NEEDLESS = {
    "steps_per_print": "print what you like; the optimizer counts traffic (optimizer.traffic())",
    "wall_clock_breakdown": "time the loop itself",
    "zero_allow_untested_optimizer": "not needed",
    "zero_force_ds_cpu_optimizer": "not needed",
    "aio": "transfer size and depth are measured on each device at first use",
    "train_micro_batch_size_per_gpu": "the batch size of your DataLoader",
    "train_batch_size": "batch size x accumulation x ranks of your own loop",
    "communication_data_type": "gradients travel in the type that DDP reduces",
    "checkpoint": "see save_checkpoint",
}


def read(path):
    """The configuration as a dict. Errors: DeviceError when it cannot be read, UsageError for no JSON."""
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except OSError as error:
        raise DeviceError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no DeepSpeed configuration: a JSON object is expected")
    return config


def convert(config):
    """(class name, keyword arguments, recipe as TOML, remarks on what has no equivalent)."""
    config = dict(config)
    remarks = []
    optimizer = config.pop("optimizer", None)
    if optimizer is None:
        remarks.append("optimizer: none given; AdamW assumed, take its options from your script")
        optimizer = {"type": "AdamW", "params": {}}
    kind = str(optimizer.get("type", "AdamW"))
    name = _CLASSES.get(kind.lower())
    params = dict(optimizer.get("params", {}))
    if name is None:
        remarks.append(f"optimizer.type {kind}: no equivalent; AdamW is written instead")
        name = "AdamW"
    if name == "AdamW" and params.pop("adam_w_mode", True) is False:
        name = "Adam"
    params.pop("torch_adam", None)
    arguments = {}
    for key, value in params.items():
        if value == "auto":
            remarks.append(f'optimizer.params.{key} "auto": Trainer fills it in; pass it yourself')
        elif key in _OPTIMIZER_OPTIONS[name]:
            arguments[key] = tuple(value) if isinstance(value, list) else value
        else:
            remarks.append(f"optimizer.params.{key}: no equivalent in {name}")

    zero = dict(config.pop("zero_optimization", {}))
    stage = zero.pop("stage", 0)
    offload = dict(zero.pop("offload_optimizer", {}) or {})
    where = offload.pop("device", "none")
    arguments["devices"] = [offload.pop("nvme_path", None) or "/nvme/smartinf"]
    if where != "nvme":
        remarks.append(
            f"zero_optimization.offload_optimizer.device {where}: state always lives on devices here; "
            "choose a directory on a fast drive"
        )
    for key in offload:
        remarks.append(f"zero_optimization.offload_optimizer.{key}: not needed; set memory_budget")
    if stage == 3:
        remarks.append(
            "zero_optimization.stage 3: parameters are not partitioned here; every rank holds all bf16 "
            "weights and a share of the state (as in stage 1)"
        )
    elif stage == 2:
        remarks.append("zero_optimization.stage 2: gradients are not partitioned; release_gradients frees them")
    if zero.pop("offload_param", None):
        remarks.append("zero_optimization.offload_param: no equivalent in the Python package")
    for key in zero:
        remarks.append(f"zero_optimization.{key}: not needed")

    clip = config.pop("gradient_clipping", None)
    if clip not in (None, "auto", 0, 0.0):
        arguments["max_grad_norm"] = clip
    elif clip == "auto":
        remarks.append('gradient_clipping "auto": Trainer clips by max_grad_norm itself')
    accumulate = config.pop("gradient_accumulation_steps", None)
    if isinstance(accumulate, int) and accumulate > 1:
        remarks.append(
            f"gradient_accumulation_steps {accumulate}: call step() after so many backward passes; with "
            f"release_gradients=True also accumulation_steps={accumulate}"
        )
    train = {"precision": '"bf16"' if dict(config.pop("bf16", {})).get("enabled") else '"f32"'}
    if isinstance(config.get("train_micro_batch_size_per_gpu"), int):
        train["micro_batch"] = config["train_micro_batch_size_per_gpu"]
    if isinstance(accumulate, int):
        train["accumulation"] = accumulate
    if dict(config.pop("fp16", {})).get("enabled") is True:
        remarks.append("fp16: keep torch's GradScaler in your loop, or better use bf16")
    if config.pop("scheduler", None):
        remarks.append("scheduler: use one of torch.optim.lr_scheduler; it writes the learning rate as ever")
    for key in list(config):
        remarks.append(f"{key}: {_NEEDLESS.get(key, 'no equivalent')}")

    recipe = _recipe(name, arguments, train)
    return name, arguments, recipe, remarks


def _recipe(name, arguments, train):
    """The same optimizer as tables of a `smartinf train` recipe (docs/recipe.md)."""
    train = dict(train)
    optimizer = {"rule": f'"{name.lower()}"'}
    for key, (table, recipe_key) in {
        "lr": (train, "lr"),
        "weight_decay": (train, "weight_decay"),
        "max_grad_norm": (train, "clip_norm"),
        "eps": (optimizer, "eps"),
        "momentum": (optimizer, "beta1"),
    }.items():
        if key in arguments:
            table[recipe_key] = arguments[key]
    for i, beta in enumerate(arguments.get("betas", ()), start=1):
        optimizer[f"beta{i}"] = beta
    lines = ["[train]", *(f"{key} = {value}" for key, value in train.items()), ""]
    lines += ["[optimizer]", *(f"{key} = {value}" for key, value in optimizer.items()), ""]
    for device in arguments["devices"]:
        lines += ["[[device]]", f"path = {json.dumps(device)}"]
    return "\n".join(lines)


def report(path):
    """What `python -m smartinf import-ds-config` prints."""
    name, arguments, recipe, remarks = convert(read(path))
    lines = ["In Python:", "", f"    optimizer = smartinf.{name}(", "        model.parameters(),"]
    lines += [f"        {key}={value!r}," for key, value in arguments.items()]
    lines += ["    )", "", "As part of a recipe for `smartinf train`:", ""]
    lines += [f"    {line}" if line else "" for line in recipe.split("\n")]
    if remarks:
        lines += ["", "Without an equivalent, or for you to do:", ""]
        lines += [f"  - {remark}" for remark in remarks]
    return "\n".join(lines)
