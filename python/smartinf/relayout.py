"""add_param_group() after the optimizer was made lays the devices out anew. State that is there already is
kept in a checkpoint beside the first device of this machine meanwhile; after a crash that is still there, and opening the
devices says so."""

import os
import shutil

from smartinf import _core, checkpoint
from smartinf.errors import MismatchError, UsageError
from smartinf.storage_options import is_remote


def folder(options):
    """Where that checkpoint is; None: no device is of this machine. Collective."""
    here = [device["path"] for device in options.devices if not is_remote(device)]
    return options.ranks.broadcast_object(f"{here[0]}-add_param_group.checkpoint" if here else None)


def discard(options):
    """The checkpoint is of no use any more. Collective."""
    kept = folder(options)
    options.ranks.barrier()
    if options.ranks.rank == 0:
        shutil.rmtree(kept, ignore_errors=True)


def lay_out_anew(session, groups, reopen):
    """reopen() opens the devices with resume=False, and returns the session. Collective."""
    if session.lineage.updates == 0 and not session.unclaimed and session.tables is None:
        reopen()
        return
    session.ready()
    kept = folder(session.options)
    if kept is None:
        raise UsageError(
            "add_param_group() keeps the state beside a device of this machine meanwhile, and there is none: save a "
            "checkpoint, make the optimizer with all groups and resume=False, and load the checkpoint"
        )
    checkpoint.save(session, groups, kept, replace=True)
    try:
        checkpoint.load(reopen(), kept, strict=False)
    except BaseException as error:
        error.add_note(f"The state before add_param_group is in {kept}: load_checkpoint() reads it.")
        raise
    discard(session.options)


def check_interrupted(options, paths):
    """After a crash the devices may be empty, or hold a beginning, while the state is in the checkpoint.
    Where they hold that very state the checkpoint is of no use any more. Collective. Errors: MismatchError."""
    kept = folder(options)
    if kept is None or options.ranks.broadcast_object(not os.path.isdir(kept)):
        return
    with options.ranks.failing_together():
        wanted = checkpoint.identity(kept)
        here = [_core.peek(path, options.remote) for path in paths]
        if all(state is not None and state[0] for state in here):
            here = checkpoint.identity_of_devices(paths, options.remote)
        if here != wanted:
            raise MismatchError(
                f"add_param_group was interrupted: the state of update {wanted['updates']} is in {kept}, "
                f"and not on {paths[0]}. Bring it back: make the optimizer with resume=False, and call "
                f'load_checkpoint("{kept}") before the first step. It is the only copy: move it away only if it is not needed.'
            )
    discard(options)
