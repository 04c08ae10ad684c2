"""What Hugging Face's TrainingArguments say of an optimizer, compared with what it was made with.

Trainer makes optimizer_cls_and_kwargs[0](groups, **kwargs) and passes on nothing of TrainingArguments but
the weight decay in the groups, so learning_rate, adam_beta2 and adam_epsilon would be ignored in silence.
Nothing here needs transformers.
"""

import sys

from smartinf.errors import UsageError

# What TrainingArguments call an optimizer's keyword.
FIELDS = {
    "lr": ("learning_rate",),
    "weight_decay": ("weight_decay",),
    "max_grad_norm": ("max_grad_norm",),
    "accumulation_steps": ("gradient_accumulation_steps",),
    "betas": ("adam_beta1", "adam_beta2"),  # these two of Adam and AdamW
    "eps": ("adam_epsilon",),
}
_ADVICE = (
    "smartinf.hf.attach(trainer, devices=...), without an optimizer in the trainer, takes them from "
    "TrainingArguments; else give the same value in both places."
)


def fields(rule):
    """FIELDS of an optimizer of this rule."""
    return FIELDS if rule in ("adam", "adamw") else {key: FIELDS[key] for key in FIELDS if key not in ("betas", "eps")}


def values(args, rule):
    """What TrainingArguments say of lr, betas and eps, by keyword."""
    made = {key: tuple(getattr(args, name) for name in names) for key, names in fields(rule).items()}
    return {key: made[key] if key == "betas" else made[key][0] for key in ("lr", "betas", "eps") if key in made}


def running(method):
    """The Trainer whose method of this name is under way, or None. Trainer hands itself to nobody, so it is looked up
    where the call comes from."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == method and frame.f_globals.get("__name__") == "transformers.trainer":
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def check_making(param_groups, options, max_grad_norm):
    """An optimizer of these is about to touch its devices. Raises UsageError when Trainer makes it with other
    values than its arguments have."""
    trainer = running("create_optimizer")
    if trainer is None:
        return
    different = differences(trainer.args, param_groups, options)
    if different:
        raise UsageError(f"TrainingArguments and the optimizer disagree: {'; '.join(different)}. {_ADVICE}")
    check_clipping(trainer.args, options, max_grad_norm)


def differences(args, param_groups, options):
    """One text for each value that TrainingArguments have and no group of the optimizer has."""
    texts = []
    for key, value in values(args, options.rule).items():
        # A schedule has changed lr already, and keeps what it began with.
        here = [group.get(f"initial_{key}", group[key]) for group in param_groups]
        here = [tuple(v) if isinstance(v, (tuple, list)) else float(v) for v in here]
        if value not in here:
            texts.append(f"{', '.join(FIELDS[key])}={value!r} there, {key}={here[0]!r} here")
    return texts


def check_clipping(args, options, max_grad_norm):
    """Raises UsageError when gradients would be clipped twice or, in silence, not at all, or when the
    optimizer counts other backward passes than Trainer makes."""
    theirs, ours = args.max_grad_norm or 0, max_grad_norm
    if not options.release:
        if theirs and ours is not None:
            raise UsageError(
                f"gradients would be clipped twice: max_grad_norm={theirs} in TrainingArguments and "
                f"max_grad_norm={ours} in the optimizer. Leave the optimizer's out."
            )
        return
    if theirs and (ours is None or float(ours) != float(theirs)):
        raise UsageError(
            f"Trainer cannot clip what release_gradients=True has taken: max_grad_norm={theirs} in "
            f"TrainingArguments, max_grad_norm={ours} in the optimizer, which has to do it. {_ADVICE}"
        )
    passes = args.gradient_accumulation_steps
    if passes != options.accumulation_steps:
        raise UsageError(
            f"gradient_accumulation_steps={passes} in TrainingArguments, but the optimizer was made with "
            f"accumulation_steps={options.accumulation_steps}, and release_gradients=True sums the "
            f"passes itself. {_ADVICE}"
        )
