"""One rank of test_ranks.py, started by torchrun: trains and leaves weights and state behind.

Usage: ranks_worker.py JSON, an object with the following, or nothing: then it takes one such object a
line, starts as many ranks as its "world" says by fork (which spares them torch's import), and prints
the number of the signal that ended one of them, or 0. With "world" 0 it is a process that is no rank, which
ends as any other does.

  check              a function of this file instead of a training
  script             a program with its arguments, instead of a training
  fsdp2_plugin       Accelerate is to use FSDP2, which it does by itself only on GPUs

  devices, results   folders
  last               steps in all; those that the devices hold are not repeated
  stop_at            waits after so many
  load               a checkpoint to begin from
  save_after         updates after which a checkpoint is saved
  add_after          updates after which a parameter without a gradient is added
  kill               [point, update]: the last rank kills itself in that update: "update" before its
                     commit is started, "agree" when it is prepared, "commit" when all have agreed, "confirm" when it
                     has committed, before it says so, "weights" when all have committed and wait for its new
                     weights; or ["random", seconds]
  stop               as kill, but it is stopped (SIGSTOP)
  refused            the optimizer cannot be made: in the error's text
  patience           seconds that the others have when a rank has ended
  timeout            of the process group, in seconds
  on_devices         gradients and weights go between ranks as between GPUs, with the CPU in their place
  ddp, passes, scaler, options    how to train
"""

import datetime
import functools
import json
import logging
import os
import pathlib
import runpy
import signal
import socket
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist

import smartinf
from smartinf import open_optimizers, ranks
from smartinf.ranks import Ranks

# One thread for each rank, as torchrun gives it. With two, torch's first gradients in a process differ
# from all later ones in one of several hundred processes, without an optimizer too.
torch.set_num_threads(1)

GLOBAL_BATCH = 8


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def plan_death(optimizer, point, when, die=die):
    if point == "random":
        threading.Thread(target=lambda: (time.sleep(when), die()), daemon=True).start()
        return
    ranks, begin_commit = optimizer._session.ranks, type(optimizer._session.lineage).to_json
    calls = ranks._calls
    gather, gather_weights, here = calls.all_gather, ranks.all_gather_weights, threading.Event()

    def all_gather(channel, mine):
        # What the core asks all ranks of that update.
        prepared, committed = (here.is_set() and what in mine for what in (b"prepare of step", b"commit of step"))
        if prepared and point == "agree" or committed and point == "confirm":
            die()
        parts = gather(channel, mine)
        if prepared and point == "commit":
            die()
        return parts

    def all_gather_weights(*given):
        if here.is_set() and point == "weights":
            optimizer._session.wait_commit()
            die()
        gather_weights(*given)

    def to_json(lineage):
        if lineage.updates == when:
            here.set()
            if point == "update":
                die()
        return begin_commit(lineage)

    calls.all_gather, ranks.all_gather_weights = all_gather, all_gather_weights
    type(optimizer._session.lineage).to_json = to_json


def stop(results):
    (results / "stopped").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def missing(job):
    """The last rank goes; what the others say of a call that needs it is left in results."""
    dist.init_process_group("gloo")
    ranks = Ranks()
    ranks.barrier()
    if ranks.rank == ranks.world - 1:
        if job["how"] == "gives up":
            ranks.gave_up(smartinf.DeviceError("the drive is gone"))
        die()
    time.sleep(0.3 * ranks.rank)  # the first of them breaks its connections to the others
    try:
        ranks.barrier()
    except smartinf.DeviceError as error:
        results = pathlib.Path(job["results"])
        (results / f"said{ranks.rank}").write_text(str(error))
        # Rank 0 has the store, where the others look up the reason.
        end = time.monotonic() + 60
        while ranks.rank == 0 and len(list(results.glob("said*"))) < ranks.world - 1 and time.monotonic() < end:
            time.sleep(0.05)


def raises(job):
    """The last rank's process group raises at the second call; what all say is left in results."""
    dist.init_process_group("gloo")
    ranks = Ranks()
    ranks.barrier()
    if ranks.rank == ranks.world - 1:

        class Broken:
            def send(self, *_):
                raise {"OSError": OSError, "RuntimeError": RuntimeError}[job["error"]]("the network card is gone")

        ranks._calls._groups = [Broken(), Broken()]
    for call in ("first", "later"):
        try:
            ranks.barrier()
        except smartinf.DeviceError as error:
            pathlib.Path(job["results"], f"{call}{ranks.rank}").write_text(str(error))
    dist.distributed_c10d._get_default_store().set(f"done{ranks.rank}", "")
    if ranks.rank == 0:  # whose process has the store
        dist.distributed_c10d._get_default_store().wait([f"done{r}" for r in range(ranks.world)])
    os._exit(0)  # torch would wait for messages that nobody sends


def unequal(job):
    """The last rank has a batch less than the others, and then makes the call that the job names. What each says is left
    in results."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=job["timeout"]))
    rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    results = pathlib.Path(job["results"])
    torch.manual_seed(4)
    model = torch.nn.Linear(20, 300)
    options = {"release_gradients": True} if job["release"] else {}
    optimizer = smartinf.AdamW(model.parameters(), devices=[job["devices"]], max_grad_norm=0, resume=True, **options)
    optimizer.save_checkpoint(results / "before")
    began = optimizer._session.lineage.updates
    calls = {
        "save_checkpoint": lambda: optimizer.save_checkpoint(results / "saved"),
        "load_checkpoint": lambda: optimizer.load_checkpoint(results / "before"),
        "full_state_dict": optimizer.full_state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(full),
    }
    full, said = None, "nothing"
    try:
        for batch in range(2 if last else 3):
            model(torch.ones(2, 20) * (batch + rank)).pow(2).mean().backward()
            optimizer.step()
            if full is None and job["call"] == "load_state_dict":
                full = optimizer.full_state_dict()
        if last:
            calls[job["call"]]()
    except smartinf.Error as error:
        said = str(error)
    (results / f"{job['call']}{rank}").write_text(f"{began} {said}")
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done{rank}", "")
    if rank == 0:  # whose process has the store
        store.wait([f"done{r}" for r in range(dist.get_world_size())])
    os._exit(0)


class TableModel(torch.nn.Module):
    """Gradients of its rows do not depend on other parameters, whose averages over ranks are rounded."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(3000, 12)
        self.dense = torch.nn.Linear(12, 20)

    def forward(self, ids):
        rows = self.table(ids)
        return (rows - torch.arange(12.0) / 64).square().mean() + self.dense(rows.detach()).square().mean()


def tables(job):
    """Trains a table whose rows all ranks have. Each leaves its rows, the norms and what it was said of a wrong row."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4 + rank)  # rows begin as rank 0 has them
    model = TableModel()
    room = {"memory": f"{64 // world}MiB", "log": f"{16 // world}MiB"}
    smartinf.move_tables(model, ["table"], rule=job.get("rule", "sparse_adam"), **room)
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, max_grad_norm=0, devices=[job["devices"]], resume=True)
    if "load" in job:
        optimizer.load_checkpoint(job["load"])
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    for step in range(optimizer._session.lineage.updates, job["last"]):
        ids = (torch.rand(GLOBAL_BATCH, 40, generator=torch.Generator().manual_seed(step)).pow(4) * 3000).long()
        wrapped(ids[rank * GLOBAL_BATCH // world : (rank + 1) * GLOBAL_BATCH // world]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == job.get("save_after"):
            optimizer.save_checkpoint(os.path.join(job["results"], "checkpoint"))
        if step + 1 == job.get("add_after"):
            optimizer.add_param_group({"params": [("late", torch.nn.Parameter(torch.ones(9)))]})
    rows, said = model.table.rows(), "nothing"
    if world > 1:
        try:
            model.table(torch.tensor([1, 3000 if rank else 2]))
        except smartinf.Error as error:
            said = str(error)
    torch.save((rows, said), pathlib.Path(job["results"], f"table{rank}.pt"))
    optimizer.close()
    dist.barrier()


def refused(text, *args, **options):
    try:
        smartinf.AdamW(*args, **options)
    except smartinf.MismatchError as error:
        assert text in str(error), error
    else:
        raise AssertionError("it was not refused")


def use_fsdp2_plugin():
    from accelerate import state, utils

    make = state.AcceleratorState.__init__

    def init(self, *args, **options):
        make(self, *args, **options)
        self.distributed_type = state.PartialState().distributed_type = utils.DistributedType.FSDP
        self.fsdp_plugin = utils.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)

    state.AcceleratorState.__init__ = init


def main(job):
    if "script" in job:
        if job.get("fsdp2_plugin"):
            use_fsdp2_plugin()
        sys.argv = job["script"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.stdout.flush()
        return
    if "check" in job:
        return globals()[job["check"]](job)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    on_devices = job.get("on_devices", False)
    if on_devices:
        ranks._BACKENDS, ranks._PIECE_ELEMENTS = {"cpu": "gloo"}, 1000
        os.environ["SMARTINF_RANKS"] = "nccl"
    if world > 1 or on_devices:
        timeout = datetime.timedelta(seconds=job["timeout"]) if "timeout" in job else None
        dist.init_process_group("gloo", timeout=timeout)
    rank = dist.get_rank() if world > 1 else 0
    results = pathlib.Path(job["results"])
    logging.basicConfig(filename=results / f"log{rank}", force=True)
    passes = job.get("passes", 1)
    ddp = job.get("ddp", True)
    # Without DistributedDataParallel it is the optimizer that makes the ranks alike.
    torch.manual_seed(4 if ddp or rank == 0 else 5)
    model = torch.nn.Sequential(torch.nn.Linear(20, 301), torch.nn.Tanh(), torch.nn.Linear(301, 20))
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(7)))
    make = smartinf.AdamW
    if "refused" in job:
        make = functools.partial(refused, job["refused"])
    optimizer = make(
        model.named_parameters(),
        lr=1e-2,
        # Of the size of a clipped gradient's elements: with torch's 1e-8 Adam makes a step of lr out of
        # what rounding left of an element, and no tolerance holds on every processor.
        eps=1e-4,
        max_grad_norm=0.05,
        devices=[job["devices"]],
        resume=True,
        **job.get("options", {}),
    )
    if optimizer is None:
        return
    assert (optimizer._session.ranks.accelerator is not None) == on_devices
    wrapped = model
    if world > 1 and ddp:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if "load" in job:
        optimizer.load_checkpoint(job["load"])
    if "kill" in job and rank == world - 1:
        plan_death(optimizer, *job["kill"])
    if "stop" in job and rank == world - 1:
        plan_death(optimizer, *job["stop"], die=lambda: stop(results))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=job.get("scaler", False))
    step = optimizer._session.lineage.updates
    overflow = job.get("overflow_at")
    while step < job["last"]:
        if step == job.get("stop_at"):
            time.sleep(60)  # for death to come
        optimizer.zero_grad()
        for micro in range(passes):
            seed = torch.Generator().manual_seed(10 * step + micro)
            x = torch.randn(GLOBAL_BATCH, 20, generator=seed)
            share = x[rank * GLOBAL_BATCH // world : (rank + 1) * GLOBAL_BATCH // world]
            loss = wrapped(share).pow(2).mean() / passes
            if step == overflow and rank == world - 1 and micro == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == overflow:
            overflow = None
            assert scaler.get_scale() == 2.0**9, scaler.get_scale()
            assert optimizer._session.lineage.updates == step
        step = optimizer._session.lineage.updates
        if step == job.get("save_after"):
            optimizer.save_checkpoint(os.path.join(job["results"], "checkpoint"))
        if step == job.get("add_after"):
            optimizer.add_param_group({"params": [("late", torch.nn.Parameter(torch.ones(9)))]})
    state = optimizer.full_state_dict()
    if rank == 0:
        made = {"model": model.state_dict(), "optimizer": state}
        torch.save(made, os.path.join(job["results"], f"w{world}.pt"))
    optimizer.close()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def serve(run):
    """run(job) on as many forked ranks as each job says."""
    for line in sys.stdin:
        job = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        places = {"WORLD_SIZE": str(job["world"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if job["world"] == 0:
            for name in places:
                os.environ.pop(name, None)
            pid = os.fork()
            if pid == 0:
                return run(job)
            print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            continue
        os.environ |= places
        ranks = []
        for rank in range(job["world"]):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                code = 1
                try:
                    run(job)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                    if "stop" in job:
                        open_optimizers.close_all()  # as at the end of any other process
                finally:
                    sys.stderr.flush()
                    os._exit(code)
        outcome = 0
        for _ in range(job["world"]):
            pid, status = os.wait()
            ranks.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            if code != 0 and outcome == 0:
                outcome = -code
                time.sleep(job.get("patience", 0.5))  # as torchrun leaves the others a moment
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
        print("ended", outcome, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1])) if len(sys.argv) > 1 else serve(main)
