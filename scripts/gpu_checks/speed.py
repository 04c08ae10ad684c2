"""Speed, beside limits that are measured in the same run: tokens a second, seconds that training waits, memory at its peak."""

import importlib.util
import json
import mmap
import os
import statistics
import threading
import time

from rows import check, in_memory

SIZES = {  # Llamas with random weights in bf16
    "tiny": {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 16},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}
_SEQUENCE = 2048


# ---- Limits.


def _rate(torch, move, size, repeats=5):
    move()
    torch.accelerator.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        move()
    torch.accelerator.synchronize()
    return size * repeats / (time.perf_counter() - began)


def _link(torch, device, size):
    pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True).zero_() for _ in range(2)]
    pageable, there = torch.zeros(size, dtype=torch.uint8), [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    up, down = torch.Stream(device=device), torch.Stream(device=device)
    here = torch.accelerator.current_stream(device)

    def both():
        up.wait_stream(here)
        down.wait_stream(here)
        with up:
            there[0].copy_(pinned[0], non_blocking=True)
        with down:
            pinned[1].copy_(there[1], non_blocking=True)
        here.wait_stream(up)
        here.wait_stream(down)

    return {
        "up": _rate(torch, lambda: there[0].copy_(pinned[0], non_blocking=True), size),
        "down": _rate(torch, lambda: pinned[0].copy_(there[0], non_blocking=True), size),
        "both": _rate(torch, both, 2 * size),
        "up_pageable": _rate(torch, lambda: there[0].copy_(pageable), size),
        "down_pageable": _rate(torch, lambda: pageable.copy_(there[0]), size),
    }


def _products(torch, device, n):
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    return _rate(torch, lambda: a @ b, 2 * n**3, 10)


def _drive(folder, size, threads=8, block=8 << 20):
    """Bytes a second written and read without the page cache."""
    path = os.path.join(folder, "drive")
    rates = {}
    # The second write is measured: the first one finds the blocks, or in memory the pages.
    for what, flags in (("write", os.O_RDWR | os.O_CREAT), ("write", os.O_RDWR), ("read", os.O_RDONLY)):
        try:
            file = os.open(path, flags | os.O_DIRECT)
        except OSError:
            return {}

        def work(first, what=what, file=file):
            memory = mmap.mmap(-1, block)
            memory.write(b"x" * block)
            for at in range(first * block, size, threads * block):
                (os.pwritev if what == "write" else os.preadv)(file, [memory], at)

        began = time.perf_counter()
        workers = [threading.Thread(target=work, args=(first,)) for first in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        os.fsync(file)
        rates[what] = size / (time.perf_counter() - began)
        os.close(file)
    os.remove(path)
    return rates


@check(seconds=60, alone=True)
def limits(here):
    import torch

    size = 1 << 20 if here.quick else 1 << 28
    found = {"link": _link(torch, here.device, size), "products": _products(torch, here.device, 256 if here.quick else 8192)}
    for name, folder in (("drive", str(here.folder)), ("memory", "/dev/shm")):
        found[name] = _drive(folder, size if here.quick else 2 << 30)
    (here.out / "limits.json").write_text(json.dumps(found))
    name = torch.cuda.get_device_name() if here.test_accelerator is None else "test accelerator"
    here.row("", True, device=name, torch=torch.__version__, cpus=os.cpu_count(), **{
        f"{of}_{way}_gb_s": round(rate / 1e9, 2) for of in ("link", "drive", "memory") for way, rate in found[of].items()
    }, products_tflop_s=round(found["products"] / 1e12, 1))  # fmt: skip


# ---- Steps.


def _model(torch, size, device):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000, max_position_embeddings=_SEQUENCE, tie_word_embeddings=False, use_cache=False, **SIZES[size]
    )
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _peak_host():
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


class _OneStep:
    """Of one way to train the same model. how: torch, deepspeed, resident or streamed. Called with tokens [batch, sequence]
    it makes a step and returns the loss."""

    def __init__(self, here, size, how, where, options):
        import torch

        import smartinf

        self.how, self.exposed_s = how, 0.0
        self.model = _model(torch, size, here.device)
        self.count = sum(p.numel() for p in self.model.parameters())
        if how == "streamed":
            budget = max(self.count // 2, 300 << 20)  # a quarter of the weights, or the least
            self.model = smartinf.stream(self.model, [where], memory_budget=budget, keep=0)
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if how == "torch":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        elif how == "deepspeed":
            self.optimizer = self.model = _deepspeed(self.model, where)
        else:
            if how == "resident":
                options |= {"devices": [where], "overlap": "auto", "model": self.model}
            self.optimizer = smartinf.AdamW(
                self.model.named_parameters(), lr=1e-5, release_gradients=True, max_grad_norm=1.0, **options
            )

    def __call__(self, ids):
        import torch

        loss = self.model(input_ids=ids, labels=ids).loss
        if self.how == "deepspeed":
            self.model.backward(loss)
            self.model.step()
            return loss
        loss.backward()
        if self.how == "torch":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.exposed_s = getattr(self.optimizer, "exposed_s", 0.0)
        return loss

    def close(self):
        if self.how in ("resident", "streamed"):
            self.optimizer.close()


def _deepspeed(model, where):
    """ZeRO-3 whose optimizer state is on a drive (ZeRO-Infinity)."""
    deps = os.environ.get("SMARTINF_CHECK_DEPS", "")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"CPATH": f"{deps}/root/usr/include", "LIBRARY_PATH": f"{deps}/root/usr/lib/x86_64-linux-gnu"}
    import deepspeed

    offload = {"device": "nvme", "nvme_path": where, "pipeline_read": True, "pipeline_write": True, "buffer_count": 14}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
        "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "sub_group_size": 100_000_000},
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True, "intra_op_parallelism": 8},
    })  # fmt: skip
    return engine


def _steps(here, size, how, *, state=12, weight=4, on="memory", **options):
    """Rows for steps of 2k and 8k tokens. on: where the state lies, "drive" or "memory". state: its bytes a parameter, which
    an update reads and writes. weight: those of them that streaming reads, in forward and in backward."""
    import torch

    where = str(here.folder / "state") if on == "drive" or here.quick else in_memory(here.folder)
    limit = json.loads((here.out / "limits.json").read_text())
    step = None
    try:
        step = _OneStep(here, "tiny" if here.quick else size, how, where, options)
        for tokens in (2048, 8192) if not here.quick else (128,):
            ids = torch.randint(32000, (max(tokens // _SEQUENCE, 1), min(tokens, _SEQUENCE)), device=here.device)
            step(ids)
            torch.accelerator.synchronize()
            if here.test_accelerator is None:
                torch.cuda.reset_peak_memory_stats()
            seconds, exposed = [], []
            for _ in range(3):
                began = time.perf_counter()
                loss = step(ids)
                torch.accelerator.synchronize()
                seconds.append(time.perf_counter() - began)
                exposed.append(step.exposed_s)
            took, count = statistics.median(seconds), step.count
            # Backward computes each block again. Weights come up in forward and in backward where they are streamed, and
            # once where they are updated only; gradients go down.
            ups = {"resident": 2, "streamed": 4}.get(how, 0) * count
            parts = {"products": 8 * count * tokens / limit["products"], "link_up": ups / limit["link"]["up"]}
            parts["link_down"] = 2 * count / limit["link"]["down"] if ups else 0
            if ups and limit[on]:
                reads = state + (2 * weight if how == "streamed" else 0)
                parts[on] = count * (reads / limit[on]["read"] + state / limit[on]["write"])
            peak = torch.cuda.max_memory_allocated() if here.test_accelerator is None else 0
            here.row(
                f"{tokens}", bool(torch.isfinite(loss)), params_b=round(count / 1e9, 2), tokens_s=round(tokens / took),
                step_s=round(took, 4), all_s=[round(s, 3) for s in seconds], exposed_s=round(statistics.median(exposed), 4),
                gpu_gb=round(peak / 1e9, 2), host_gb=round(_peak_host() / 1e9, 2), times_limit=round(took / max(parts.values()), 3),
                **{f"limit_{part}_s": round(s, 4) for part, s in parts.items()},
            )  # fmt: skip
        if how != "deepspeed" and here.test_accelerator is None:
            _trace(here, torch, lambda: step(ids))
    finally:
        if step is not None:
            step.close()


def _trace(here, torch, step):
    """One step in the profiler: calls in which the host waits for the GPU, a trace, and a picture of the streams."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    path = here.out / f"{here.check}.trace.json"
    profiled.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    computing = {e["tid"] for e in events if e.get("cat") == "cuda_runtime" and "LaunchKernel" in e["name"]}
    waits = {}  # not those of the thread that hands over gradients
    for event in events:
        if event.get("cat") == "cuda_runtime" and "Synchronize" in event["name"] and event["tid"] in computing:
            waits[event["name"]] = waits.get(event["name"], 0) + 1
    here.row("trace", True, host_waits=waits)
    spans = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy") and "dur" in e]
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {"kernel": "kernels", "HtoD": "host to device", "DtoH": "device to host", "other": "other copies"}
    lines = {}
    for event in spans:
        kind = "kernel" if event["cat"] == "kernel" else next((k for k in ("HtoD", "DtoH") if k in event["name"]), "other")
        lines.setdefault((kind, event["args"].get("stream")), []).append((event["ts"], event["dur"]))
    begin = min(e["ts"] for e in spans)
    figure, axes = pyplot.subplots(figsize=(14, 1 + 0.5 * len(lines)))
    for row, (key, found) in enumerate(sorted(lines.items(), key=str)):
        axes.broken_barh([((ts - begin) / 1e3, dur / 1e3) for ts, dur in found], (row - 0.4, 0.8))
    axes.set_yticks(range(len(lines)), [f"{names[kind]}, stream {stream}" for kind, stream in sorted(lines, key=str)])
    axes.set_xlabel("ms")
    axes.set_title(f"{here.check}: one step")
    figure.tight_layout()
    figure.savefig(here.out / f"{here.check}.png", dpi=110)
    path.unlink()


@check(seconds=90, alone=True)
def torch_1b(here):
    _steps(here, "1b", "torch")


_SMALL = {"state": 4.1, "state_format": "q4", "master": "m24"}  # 4 bytes a parameter


@check(seconds=120, alone=True)
def streamed_1b(here):
    _steps(here, "1b", "streamed", **_SMALL)


@check(seconds=120, alone=True)
def resident_1b(here):
    _steps(here, "1b", "resident", **_SMALL)


@check(seconds=120, alone=True)
def cached_1b(here):
    _steps(here, "1b", "resident", durability="none", state_cache=1 << 20 if here.quick else "16GB")


@check(seconds=120, alone=True)
def drive_1b(here):
    _steps(here, "1b", "streamed", on="drive", **_SMALL)


@check(seconds=240, alone=True, quick=False)
def deepspeed_1b(here):
    if importlib.util.find_spec("deepspeed") is None:
        return here.row("", None, why="DeepSpeed is not here: gpu_check_deps.sh --deepspeed")
    return _steps(here, "1b", "deepspeed")


@check(seconds=150, alone=True, quick=False)
def streamed_7b(here):
    _steps(here, "7b", "streamed", durability="none", **_SMALL)


@check(seconds=150, alone=True, quick=False)
def resident_7b(here):
    _steps(here, "7b", "resident", durability="none", **_SMALL)
