"""From a DeepSpeed configuration, or accelerate's with one in it, to what is written here instead."""

import json
import os

from smartinf import trainer_arguments
from smartinf.errors import DeviceError, UsageError

_CLASSES = {
    "adamw": "AdamW",
    "adam": "AdamW",  # DeepSpeed's Adam decays as AdamW unless adam_w_mode says otherwise
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "lion": "Lion",
}
# What each class takes of optimizer.params, and DeepSpeed's own value where they say nothing.
_OPTIONS = {
    "AdamW": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "Adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "SGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    "Adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0},
}
_SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
# How the recipe writes what is not to be clipped, and the optimizer.
_NO_CLIPPING = float("inf")
_MODEL = "MODEL"  # a folder, or a name on the Hub
_DEVICE = "/nvme/smartinf"
# Keys whose meaning has another place here, or none.
_ELSEWHERE = {
    "steps_per_print": "logging_steps of TrainingArguments, or what your loop prints",
    "wall_clock_breakdown": "optimizer.exposed_s has the seconds that a step was waited for",
    "zero_allow_untested_optimizer": "not needed",
    "zero_force_ds_cpu_optimizer": "not needed",
    "aio": "not needed: size and depth of transfers are measured on each device at first use",
    "train_micro_batch_size_per_gpu": "the batch size of your DataLoader, or per_device_train_batch_size",
    "train_batch_size": "follows from batch size, accumulation and the number of GPUs",
    "communication_data_type": "DistributedDataParallel or FSDP2 chooses it",
    "prescale_gradients": "not needed",
    "gradient_predivide_factor": "not needed",
    "checkpoint": "save_checkpoint() of the optimizer; with Trainer its own checkpoints",
    "activation_checkpointing": "model.gradient_checkpointing_enable(); in place of cpu_checkpointing "
    "smartinf.offload_activations() puts them on drives",
    "zero_optimization.offload_optimizer.ratio": "all of the state is on the devices; state_cache= keeps a part in memory, too",
    "zero_optimization.zero_hpz_partition_size": "no equivalent; hybrid sharding is refused",
    "zero_optimization.mics_shard_size": "no equivalent; hybrid sharding is refused",
}
# Keys of zero_optimization that tune DeepSpeed's own buffers.
_BUFFERS = {
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "reduce_bucket_size",
    "contiguous_gradients", "sub_group_size", "round_robin_gradients", "load_from_fp32_weights", "elastic_checkpoint",
    "ignore_unused_parameters", "legacy_stage1", "memory_efficient_linear", "use_multi_rank_bucket_allreduce",
    "override_module_apply", "cpu_offload_use_pin_memory", "prefetch_bucket_size", "param_persistence_threshold",
    "model_persistence_threshold", "max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save",
    "gather_fp16_weights_on_model_save",
}  # fmt: skip


class Converted:
    """arguments: of the optimizer, `name`; from_pretrained: of that call, or None where the model stays in memory. recipe:
    for `smartinf train`, as TOML. training: fields of TrainingArguments. remarks: what is left to say."""

    def __init__(self):
        self.name, self.arguments, self.from_pretrained = "AdamW", {}, None
        self.recipe, self.training, self.remarks = "", {}, []


def read(path):
    """A DeepSpeed configuration as a dict. Errors: DeviceError when it cannot be read, UsageError for something else."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise DeviceError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text") from error
    if os.path.splitext(path)[1] in (".yaml", ".yml"):
        return _of_accelerate(path, text)
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is not JSON (comments, which DeepSpeed allows, are not part of it): {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no DeepSpeed configuration: a JSON object is expected")
    return config


def _of_accelerate(path, text):
    """What `accelerate config` has written, in DeepSpeed's words."""
    import yaml  # comes with accelerate

    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {error}") from error
    plugin = given.get("deepspeed_config") if isinstance(given, dict) else None
    if not isinstance(plugin, dict):
        raise UsageError(f"{path} has no deepspeed_config: it is no configuration of accelerate for DeepSpeed")
    file = plugin.get("deepspeed_config_file")
    if file not in (None, "none"):
        return read(os.path.join(os.path.dirname(path), file))
    zero = {"stage": plugin.get("zero_stage", 2)}
    for part in ("offload_optimizer", "offload_param"):
        zero[part] = {"device": plugin.get(f"{part}_device"), "nvme_path": plugin.get(f"{part}_nvme_path")}
    config = {key: plugin[key] for key in ("gradient_accumulation_steps", "gradient_clipping") if key in plugin}
    precision = given.get("mixed_precision")
    if precision in ("bf16", "fp16"):
        config[precision] = {"enabled": True}
    return config | {"zero_optimization": zero}


def uses_trainer(config):
    """Whether Hugging Face's Trainer fills it in: "auto" is its word, not DeepSpeed's."""
    if isinstance(config, dict):
        return any(uses_trainer(value) for value in config.values())
    return config == "auto"


def _part(config, key):
    """Takes an object out of a configuration."""
    value = config.pop(key, None)
    if value is None or value == "auto":
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{key} is {json.dumps(value)} in the configuration, and an object is expected")
    return dict(value)


def convert(config):
    """A configuration as a Converted. Errors: UsageError for one that DeepSpeed would not take either."""
    for_trainer = uses_trainer(config)
    config, made = dict(config), Converted()
    remarks = made.remarks
    optimizer = _optimizer(config, made)
    _zero_optimization(config, made)
    clip = config.pop("gradient_clipping", None) or 0.0
    if clip == "auto":
        clip = None  # TrainingArguments say it
    elif clip > 0:
        made.arguments["max_grad_norm"] = clip
    elif made.arguments.get("release_gradients") or made.from_pretrained:
        made.arguments["max_grad_norm"] = _NO_CLIPPING  # says that nothing is to be clipped
    accumulate = config.pop("gradient_accumulation_steps", None)
    many = isinstance(accumulate, int) and accumulate > 1
    if many and (made.arguments.get("release_gradients") or made.from_pretrained):
        made.arguments["accumulation_steps"] = accumulate
    if many and not for_trainer:
        remarks.append(f"gradient_accumulation_steps {accumulate}: call step() after so many backward passes")
    if many and made.from_pretrained and not for_trainer:
        remarks.append(
            "accumulation over a model whose weights are on drives: smartinf.forward_backward() in your loop, and StreamedTrainer "
            "with Trainer, let all batches of a step go through a block together, so that its weights are read twice a step"
        )
    bf16, fp16 = (_part(config, key).get("enabled") for key in ("bf16", "fp16"))
    if bf16:
        remarks.append(
            "bf16: load the model with dtype=torch.bfloat16, and leave bf16=True out of TrainingArguments, which is autocast; "
            "the f32 weights are on the devices"
        )
    if fp16 is True:
        remarks.append("fp16: keep torch's GradScaler (fp16=True in TrainingArguments), or better use bf16")
    if made.from_pretrained is not None and bf16:
        made.from_pretrained["dtype"] = "bfloat16"
    schedule = _part(config, "scheduler")
    if schedule:
        remarks.append(
            "scheduler: lr_scheduler_type and warmup_steps of TrainingArguments choose it; in a loop of your own one of "
            "torch.optim.lr_scheduler does, which writes the learning rate as ever"
        )
    train = {"precision": '"bf16"' if bf16 else '"f32"'}
    train["schedule"] = json.dumps(_SCHEDULES.get(str(schedule.get("type", "")).lower(), "constant"))
    warmup = (schedule.get("params") or {}).get("warmup_num_steps")
    if isinstance(warmup, int):
        train["warmup_steps"] = warmup
    if isinstance(micro := config.get("train_micro_batch_size_per_gpu"), int):
        train["micro_batch"] = made.training["per_device_train_batch_size"] = micro
    if isinstance(accumulate, int):
        train["accumulation"] = made.training["gradient_accumulation_steps"] = accumulate
        remarks.append("train.accumulation of the recipe counts the micro batches of all ranks together")
    for key, value in config.items():
        if value != "auto":
            remarks.append(f"{key}: {_ELSEWHERE.get(key, 'no equivalent')}")
    if optimizer and made.arguments.get("weight_decay", "auto"):
        remarks.append(
            "optimizer.params.weight_decay: DeepSpeed decays all parameters that it is given, as a loop with model.parameters() "
            "does; Trainer leaves biases and norms out, and a recipe all that are no matrices (train.weight_decays)"
        )
    made.recipe = _recipe(made, train, clip)
    return made


def _optimizer(config, made):
    """Returns whether the configuration names one."""
    optimizer = _part(config, "optimizer")
    if not optimizer:
        made.remarks.append("optimizer: none given; AdamW assumed, take its options from your script")
        return False
    kind = str(optimizer.get("type", "AdamW"))
    name, params = _CLASSES.get(kind.lower()), _part(optimizer, "params")
    if name is None:
        made.remarks.append(f"optimizer.type {kind}: no equivalent; AdamW is written instead")
        name = "AdamW"
    if name == "AdamW" and params.pop("adam_w_mode", True) is False:
        name = "Adam"
    made.name, options = name, dict(_OPTIONS[name])
    if params.pop("torch_adam", False) and name == "AdamW":
        options["weight_decay"] = 0.01  # torch's own
    for key, value in options.items():
        given = params.pop(key, value)
        if given != "auto":  # TrainingArguments say it
            made.arguments[key] = tuple(given) if isinstance(given, list) else given
    for key in params:
        made.remarks.append(f"optimizer.params.{key}: no equivalent in {name}")
    return True


def _zero_optimization(config, made):
    arguments, remarks = made.arguments, made.remarks
    zero = config.pop("zero_optimization", None)
    zero = {"stage": 1} if zero is True else _part({"zero_optimization": zero or None}, "zero_optimization")
    if "aio" in zero:
        config.setdefault("aio", zero.pop("aio"))
    stage = zero.pop("stage", 0)
    offload, parameters = _part(zero, "offload_optimizer"), _part(zero, "offload_param")
    if zero.pop("cpu_offload", False):  # as DeepSpeed wrote it once
        offload.setdefault("device", "cpu")
    if zero.pop("cpu_offload_params", False):
        parameters.setdefault("device", "cpu")
    where, weights_where = offload.pop("device", None) or "none", parameters.pop("device", None) or "none"
    path, weights_path = offload.pop("nvme_path", None), parameters.pop("nvme_path", None)
    devices = [path or weights_path or _DEVICE]
    if where != "nvme":
        remarks.append(
            f"zero_optimization.offload_optimizer.device {where}: the state is on devices here, whatever else is in memory; "
            "name a folder on a fast drive, or one on each of several. state_cache= keeps a part of it in memory, too"
        )
    needless = [f"offload_optimizer.{key}" for key in offload if key != "ratio"]
    needless += [f"offload_param.{key}" for key in parameters if key != "max_in_cpu"]
    needless += [key for key in zero if key.removeprefix("stage3_") in _BUFFERS]
    zero = {key: value for key, value in zero.items() if key.removeprefix("stage3_") not in _BUFFERS}
    if weights_where == "none":
        arguments["devices"] = devices
        if stage in (2, 3):
            arguments["release_gradients"] = True
            remarks.append(
                f"zero_optimization.stage {stage}, gradients: release_gradients=True frees each of them during backward; "
                "clip_grad_norm_ finds none then, and max_grad_norm of the optimizer clips. On several GPUs FSDP2 divides them; a "
                "model in DistributedDataParallel, as Trainer makes one, holds all of them: leave release_gradients out there"
            )
    else:
        made.from_pretrained = {"devices": devices, "memory_budget": "24GB"}
        remarks.append(
            f"zero_optimization.offload_param.device {weights_where}: smartinf.from_pretrained() keeps the weights on the "
            "devices, and each block of the model has them in memory while it computes. Of memory_budget (yours for 24GB) as "
            "many blocks as fit stay in memory. smartinf.stream(model, devices=...) does it with a model that is in memory "
            "(docs/streamed-models.md). This is for one process; several GPUs divide the weights by FSDP2, which may keep them in host "
            "memory (CPUOffloadPolicy)"
        )
        if path and weights_path and path != weights_path:
            devices.append(weights_path)
            remarks.append("the state and the weights are divided among all devices, so both folders are given")
        if "max_in_cpu" in parameters:
            remarks.append(
                "zero_optimization.offload_param.max_in_cpu: follows from memory_budget; keep= says how many bytes of weights stay "
                "in memory (two for a parameter in bf16)"
            )
    if stage == 3:
        remarks.append(
            "zero_optimization.stage 3, weights: several GPUs divide them by FSDP2, torch's fully_shard, and each rank's devices "
            "hold the state of its part: TrainingArguments(fsdp=True, fsdp_config={\"version\": 2}) with Trainer, else "
            "fully_shard() before the optimizer is made (docs/python.md, FSDP2). One GPU has all of them"
            + ("" if made.from_pretrained else "; if they do not fit, make the model with "
               "smartinf.from_pretrained(\"MODEL\", devices=..., memory_budget=...), see docs/streamed-models.md")
        )  # fmt: skip
    if needless:
        remarks.append(f"zero_optimization.{', '.join(needless)}: not needed")
    if "ratio" in offload:
        zero["offload_optimizer.ratio"] = offload["ratio"]
    for key, value in zero.items():
        if value != "auto":
            key = f"zero_optimization.{key}"
            remarks.append(f"{key}: {_ELSEWHERE.get(key, 'no equivalent')}")


def _recipe(made, train, clip):
    """The same as tables of a `smartinf train` recipe (docs/recipe.md). Whose values the configuration leaves open has
    the recipe's own."""
    given, train = made.arguments, dict(train)
    optimizer = {"rule": f'"{made.name.lower()}"'}
    for key, (table, recipe_key) in {
        "lr": (train, "lr"),
        "weight_decay": (train, "weight_decay"),
        "eps": (optimizer, "eps"),
        "momentum": (optimizer, "beta1"),
        "dampening": (optimizer, "dampening"),
        "nesterov": (optimizer, "nesterov"),
    }.items():
        if key in given:
            table[recipe_key] = json.dumps(given[key])
    if clip is not None:
        train["clip_norm"] = clip
    for i, beta in enumerate(given.get("betas", ()), start=1):
        optimizer[f"beta{i}"] = beta
    lines = ["[model]", f'from = "{_MODEL}"', ""]
    lines += ["[train]", *(f"{key} = {value}" for key, value in train.items()), ""]
    lines += ["[optimizer]", *(f"{key} = {value}" for key, value in optimizer.items()), ""]
    for device in (made.from_pretrained or given)["devices"]:
        lines += ["[[device]]", f"path = {json.dumps(device)}"]
    return "\n".join(lines)


def report(path):
    """What `python -m smartinf import-ds-config` prints."""
    config = read(path)
    made = convert(config)
    lines = []
    if made.from_pretrained:
        lines += ["The model, whose weights are larger than memory:", ""]
        lines += [*_call("model = smartinf.from_pretrained", [json.dumps(_MODEL)], made.from_pretrained), ""]
    if not uses_trainer(config):
        lines += ["In a loop of your own:", ""]
        lines += [*_call(f"optimizer = smartinf.{made.name}", ["model.named_parameters()"], made.arguments), ""]
    lines += _for_trainer(made)
    lines += ["", f"With the command, in a recipe for `smartinf train` ({_MODEL}: a folder of a model of docs/models.md):", ""]
    lines += [f"    {line}" if line else "" for line in made.recipe.split("\n")]
    if made.remarks:
        lines += ["", "What each setting has become, and what is for you to do (docs/deepspeed.md):", ""]
        lines += [f"  - {remark}" for remark in made.remarks]
    return "\n".join(lines)


def _call(function, given, arguments):
    """The lines of a call."""
    texts = [*given, *(f"{key}={_written(value)}" for key, value in arguments.items())]
    line = f"    {function}({', '.join(texts)})"
    return [line] if len(line) <= 110 else [f"    {function}(", *(f"        {text}," for text in texts), "    )"]


def _written(value):
    if value == _NO_CLIPPING:
        return 'float("inf")'
    return json.dumps(value) if isinstance(value, (str, list)) else repr(value)


def _for_trainer(made):
    """The lines for Trainer: what the configuration fixes goes to TrainingArguments, as "auto" does."""
    arguments, fixed = dict(made.arguments), dict(made.training)
    for key, fields in trainer_arguments.fields(made.name.lower()).items():
        if key in arguments:
            value = arguments.pop(key)
            fixed |= zip(fields, value if len(fields) > 1 else [value], strict=True)
    if fixed.get("max_grad_norm") == _NO_CLIPPING:
        fixed["max_grad_norm"] = 0.0
    lines = [
        'With Trainer, or a trainer of TRL, in place of deepspeed=... (what the configuration calls "auto" is as ever):',
        "",
        *(_call("args = transformers.TrainingArguments", ["..."], fixed) if fixed else ["    args = ...  # as they are"]),
    ]
    kind = "transformers.Trainer"
    if made.from_pretrained:
        lines += [f"    class LayerwiseTrainer(smartinf.hf.StreamedTrainer, {kind}): pass"]
        kind = "LayerwiseTrainer"
    lines += [f"    trainer = {kind}(model=model, args=args, train_dataset=dataset)"]
    other = [] if made.name == "AdamW" else [f"optimizer_class=smartinf.{made.name}"]
    return [*lines, *_call("smartinf.hf.attach", ["trainer", *other], arguments), "    trainer.train()"]
