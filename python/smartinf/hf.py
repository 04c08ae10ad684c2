"""Hugging Face: the optimizer's state in Trainer's checkpoint folders and in Accelerate's.

Trainer writes our small state dict to checkpoint-N/optimizer.pt; the state itself goes into
checkpoint-N/smartinf/ beside it, so save_total_limit, moving a folder and resume_from_checkpoint work
as they do with any optimizer.
"""

import os

from transformers import TrainerCallback

from smartinf import checkpoint
from smartinf.errors import MismatchError, UsageError

_FOLDER = "smartinf"


def unwrap(optimizer):
    """Our optimizer inside what Accelerate wraps around it; None when it is not one of ours."""
    from smartinf.storage_optimizer import StorageOptimizer

    while optimizer is not None and not isinstance(optimizer, StorageOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


class CheckpointCallback(TrainerCallback):
    """Give it to Trainer(callbacks=[...]): every checkpoint-N then holds the optimizer's state, and
    resume_from_checkpoint takes it from there.

    resume_from: the checkpoint folder, when it is neither below output_dir nor
        TrainingArguments.resume_from_checkpoint. Which state is meant is checked in any case.
    """

    def __init__(self, resume_from=None):
        self._resume_from = resume_from

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        ours = unwrap(optimizer)
        if ours is None:
            raise UsageError("smartinf.hf.CheckpointCallback needs a smartinf optimizer in the Trainer")
        ours._state_is_saved = True
        wanted = ours._expected
        if wanted is None:
            return
        name = f"checkpoint-{state.global_step}"
        given = args.resume_from_checkpoint
        candidates = [
            self._resume_from,
            given if isinstance(given, str) else None,
            os.path.join(args.output_dir, name),
        ]
        looked = []
        for folder in filter(None, candidates):
            inner = os.path.join(folder, _FOLDER)
            looked.append(inner)
            if os.path.isdir(inner) and checkpoint.identity(inner) == wanted:
                ours.load_checkpoint(inner)
                return
        raise MismatchError(
            f"the optimizer state of step {state.global_step} was not found in {', '.join(looked)}. Give "
            "the folder: smartinf.hf.CheckpointCallback(resume_from=...)."
        )

    def on_save(self, args, state, control, optimizer=None, **kwargs):
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}", _FOLDER)
        # Trainer has just written the rest of the folder, over an older one of that step if need be.
        unwrap(optimizer).save_checkpoint(folder, replace=True)


def register(accelerator, optimizer):
    """Makes accelerator.save_state() and load_state() carry the state of `optimizer` (ours, wrapped by
    prepare() or not), in a folder smartinf/ inside theirs. Returns nothing."""
    ours = unwrap(optimizer)
    if ours is None:
        raise UsageError("smartinf.hf.register needs a smartinf optimizer")
    ours._state_is_saved = True

    def save(models, weights, folder):
        ours.save_checkpoint(os.path.join(folder, _FOLDER), replace=True)

    def load(models, folder):
        # Before Accelerate loads the small state dict, which then finds what it refers to.
        ours.load_checkpoint(os.path.join(folder, _FOLDER))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
