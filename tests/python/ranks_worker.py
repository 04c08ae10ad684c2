"""One rank of test_ranks.py, started by torchrun: trains and leaves weights and state behind.

Usage: ranks_worker.py JSON, an object with the following, or nothing: then it takes one such object a
line, starts as many ranks as its "world" says by fork (which spares them torch's import), and prints
the number of the signal that ended one of them, or 0.

  script             a program with its arguments, instead of a training
  fsdp2_plugin       Accelerate is to use FSDP2, which it does by itself only on GPUs

  devices, results   folders
  last               steps in all; those that the devices hold are not repeated
  stop_at            waits after so many
  load               a checkpoint to begin from
  save_after         updates after which a checkpoint is saved
  add_after          updates after which a parameter without a gradient is added
  kill               [point, update]: the last rank kills itself in that update: "update" before its
                     commit is started, "agree" when it is prepared, "commit" when all have agreed;
                     or ["random", seconds]
  ddp, passes, scaler, options    how to train
"""

import json
import os
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

# One thread for each rank, as torchrun gives it. With two, torch's first gradients in a process differ
# from all later ones in one of several hundred processes, without an optimizer too.
torch.set_num_threads(1)

GLOBAL_BATCH = 8


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def plan_death(optimizer, point, when):
    if point == "random":
        threading.Thread(target=lambda: (time.sleep(when), die()), daemon=True).start()
        return
    ranks, begin_commit = optimizer._session.ranks, type(optimizer._session.lineage).to_json
    agree = ranks.all_agree

    def all_agree(yes):
        # The commit of update N is agreed on when N + 1 begins.
        here = optimizer._session.lineage.updates == when
        if here and point == "agree":
            die()
        agreed = agree(yes)
        if here and point == "commit":
            die()
        return agreed

    def to_json(lineage):
        if point == "update" and lineage.updates == when:
            die()
        return begin_commit(lineage)

    ranks.all_agree = all_agree
    type(optimizer._session.lineage).to_json = to_json


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
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    passes = job.get("passes", 1)
    ddp = job.get("ddp", True)
    # Without DistributedDataParallel it is the optimizer that makes the ranks alike.
    torch.manual_seed(4 if ddp or rank == 0 else 5)
    model = torch.nn.Sequential(torch.nn.Linear(20, 301), torch.nn.Tanh(), torch.nn.Linear(301, 20))
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(7)))
    optimizer = smartinf.AdamW(
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
    wrapped = model
    if world > 1 and ddp:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if "load" in job:
        optimizer.load_checkpoint(job["load"])
    if "kill" in job and rank == world - 1:
        plan_death(optimizer, *job["kill"])
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
        os.environ |= {"WORLD_SIZE": str(job["world"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
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
                time.sleep(0.5)  # as torchrun leaves the others a moment
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
        print("ended", outcome, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1])) if len(sys.argv) > 1 else serve(main)
