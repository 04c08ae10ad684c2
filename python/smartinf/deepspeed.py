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
# TrainingArguments' name of what the optimizer's call says, for a value that is not "auto".
_FIELDS = {
    "lr": "learning_rate",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
    "accumulation_steps": "gradient_accumulation_steps",
}
_NO_CLIPPING = float("inf")
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


def uses_trainer(config):
    """Whether Hugging Face's Trainer fills it in: "auto" is its word, not DeepSpeed's."""
    if isinstance(config, dict):
        return any(uses_trainer(value) for value in config.values())
    return config == "auto"


def convert(config):
    """(class name, keyword arguments, recipe as TOML, remarks on what has no equivalent)."""
    for_trainer = uses_trainer(config)
    config = dict(config)
    remarks = []
    name, arguments = _optimizer(config, remarks)
    _zero_optimization(config, arguments, remarks)
    clip = config.pop("gradient_clipping", None)
    if clip not in (None, "auto", 0, 0.0):
        arguments["max_grad_norm"] = clip
    elif arguments.get("release_gradients") and not for_trainer:
        arguments["max_grad_norm"] = _NO_CLIPPING  # says that nothing is to be clipped
    accumulate = config.pop("gradient_accumulation_steps", None)
    if isinstance(accumulate, int) and accumulate > 1:
        remarks.append(
            f"gradient_accumulation_steps {accumulate}: call step() after so many backward passes"
        )
        if arguments.get("release_gradients"):
            arguments["accumulation_steps"] = accumulate
    bf16 = dict(config.pop("bf16", {})).get("enabled")
    train = {"precision": '"bf16"' if bf16 else '"f32"'}
    if bf16 == "auto":
        remarks.append(
            'bf16 "auto": the recipe has precision = "bf16"; in Python the model decides, so load it with '
            "dtype=torch.bfloat16 (and leave bf16=True out of TrainingArguments)"
        )
    if isinstance(config.get("train_micro_batch_size_per_gpu"), int):
        train["micro_batch"] = config["train_micro_batch_size_per_gpu"]
    if isinstance(accumulate, int):
        train["accumulation"] = accumulate
    if dict(config.pop("fp16", {})).get("enabled") is True:
        remarks.append("fp16: keep torch's GradScaler in your loop, or better use bf16")
    if config.pop("scheduler", None):
        remarks.append(
            "scheduler: lr_scheduler_type and warmup_steps of TrainingArguments choose it"
            if for_trainer
            else "scheduler: use one of torch.optim.lr_scheduler; it writes the learning rate as ever"
        )
    for key, value in config.items():
        if value == "auto":
            continue
        remarks.append(f"{key}: {_NEEDLESS.get(key, 'no equivalent')}")

    recipe = _recipe(name, arguments, train)
    return name, arguments, recipe, remarks


def _optimizer(config, remarks):
    """(class name, its keyword arguments)"""
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
            continue  # TrainingArguments say it, and report() prints the line that takes it from there
        if key in _OPTIMIZER_OPTIONS[name]:
            arguments[key] = tuple(value) if isinstance(value, list) else value
        else:
            remarks.append(f"optimizer.params.{key}: no equivalent in {name}")
    return name, arguments


def _zero_optimization(config, arguments, remarks):
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
    if stage in (2, 3):
        arguments["release_gradients"] = True
        remarks.append(
            f"zero_optimization.stage {stage}: release_gradients=True frees every gradient during backward, "
            "in place of partitioning them; clip_grad_norm_ finds none then, max_grad_norm clips"
        )
    if stage == 3:
        remarks.append(
            "zero_optimization.stage 3: parameters are not partitioned here; every GPU holds all bf16 "
            "weights, 2 bytes per parameter, and every rank a share of the state (as in stage 1)"
        )
    parameters = dict(zero.pop("offload_param", {}) or {})
    if parameters.get("device", "none") != "none":
        remarks.append(
            "zero_optimization.offload_param: neither this package nor `smartinf train` moves parameters "
            "off the GPU; the model's weights must fit there"
        )
    for key in zero:
        remarks.append(f"zero_optimization.{key}: not needed")


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
        if key in arguments and arguments[key] != _NO_CLIPPING:
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
    config = read(path)
    name, arguments, recipe, remarks = convert(config)
    if uses_trainer(config):
        lines = _for_trainer(name, arguments, config)
    else:
        lines = ["In Python:", "", f"    optimizer = smartinf.{name}(", "        model.parameters(),"]
        for key, value in arguments.items():
            text = 'float("inf")' if value == _NO_CLIPPING else repr(value)
            lines.append(f"        {key}={text},")
        lines.append("    )")
    lines += ["", "As part of a recipe for `smartinf train`, which trains from scratch:", ""]
    lines += [f"    {line}" if line else "" for line in recipe.split("\n")]
    if remarks:
        lines += ["", "Without an equivalent, or for you to do:", ""]
        lines += [f"  - {remark}" for remark in remarks]
    return "\n".join(lines)


def _for_trainer(name, arguments, config):
    """The lines for Trainer: what the configuration fixes goes to TrainingArguments, as "auto" does."""
    arguments = dict(arguments)
    fixed = {}
    adam = name in ("AdamW", "Adam")
    for key, field in _FIELDS.items():
        if key in arguments and (adam or key != "eps"):
            fixed[field] = arguments.pop(key)
    if adam and "betas" in arguments:
        fixed["adam_beta1"], fixed["adam_beta2"] = arguments.pop("betas")
    for key, field in (
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
    ):
        if isinstance(config.get(key), int):
            fixed[field] = config[key]
    if name != "AdamW":
        arguments = {"optimizer_class": f"smartinf.{name}", **arguments}
    own = ", ".join(f"{key}={value!r}" for key, value in fixed.items())
    given = [
        f"            {key}={value if key == 'optimizer_class' else repr(value)},"
        for key, value in arguments.items()
    ]
    return [
        'With Trainer, which fills in what the configuration calls "auto", in place of deepspeed=...:',
        "",
        f"    args = transformers.TrainingArguments(..., {own})" if own else "    args = ...  # as they are",
        "    trainer = transformers.Trainer(",
        "        model=model, args=args, train_dataset=dataset,",
        "        **smartinf.hf.optimizer(",
        "            args,",
        *given,
        "        ),",
        "    )",
    ]
