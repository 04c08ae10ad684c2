"""Speed, beside limits that are measured in the same run: tokens a second, seconds that training waits, memory at its peak."""

import json
import mmap
import os
import statistics
import threading
import time

from rows import check

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
    for what, flags in (("write", os.O_RDWR | os.O_CREAT), ("read", os.O_RDONLY)):
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
        found[name] = _drive(folder, size if here.quick else 4 << 30)
    (here.out / "limits.json").write_text(json.dumps(found))
    name = torch.cuda.get_device_name() if here.pretended is None else "pretended"
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


def _steps(here, size, how, *, state=12, on="memory", **options):
    """Rows for steps of 2k and 8k tokens. how: torch, resident or streamed. on: where the state lies, "drive" or "memory".
    state: its bytes a parameter, which an update reads and writes."""
    import torch

    import smartinf

    size = "tiny" if here.quick else size
    if how == "streamed":
        torch.set_num_threads(os.cpu_count())
    model = _model(torch, size, here.device)
    count = sum(p.numel() for p in model.parameters())
    where = str(here.folder / "state") if on == "drive" or here.quick else f"/dev/shm/{here.folder.name}"
    if how == "streamed":
        model = smartinf.stream(model, [where], memory_budget=max(count // 2, 300 << 20), keep=0).to(here.device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if how == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    else:
        if how == "resident":
            options |= {"devices": [where], "overlap": "auto", "model": model}
        optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-5, release_gradients=True, max_grad_norm=1.0, **options)
    limit = json.loads((here.out / "limits.json").read_text())
    try:
        for tokens in (2048, 8192) if not here.quick else (128,):
            ids = torch.randint(32000, (max(tokens // _SEQUENCE, 1), min(tokens, _SEQUENCE)), device=here.device)

            def step(ids=ids):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                if how == "torch":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                return loss

            step()
            torch.accelerator.synchronize()
            if here.pretended is None:
                torch.cuda.reset_peak_memory_stats()
            seconds, exposed = [], []
            for _ in range(4):
                began = time.perf_counter()
                loss = step()
                torch.accelerator.synchronize()
                seconds.append(time.perf_counter() - began)
                exposed.append(getattr(optimizer, "exposed_s", 0.0))
            took = statistics.median(seconds)
            # Backward computes each block again; weights in bf16 come up twice where they are streamed, once where
            # they are updated only; gradients go down.
            ups = {"torch": 0, "resident": 2 * count, "streamed": 4 * count}[how]
            parts = {"products": 8 * count * tokens / limit["products"], "link_up": ups / limit["link"]["up"]}
            parts["link_down"] = 0 if how == "torch" else 2 * count / limit["link"]["down"]
            if how != "torch" and limit[on]:
                parts[on] = state * count * (1 / limit[on]["read"] + 1 / limit[on]["write"])
            peak = torch.cuda.max_memory_allocated() if here.pretended is None else 0
            here.row(
                f"{tokens}", bool(torch.isfinite(loss)), params_b=round(count / 1e9, 2), tokens_s=round(tokens / took),
                step_s=round(took, 4), all_s=[round(s, 3) for s in seconds], exposed_s=round(statistics.median(exposed), 4),
                gpu_gb=round(peak / 1e9, 2), host_gb=round(_peak_host() / 1e9, 2), times_limit=round(took / max(parts.values()), 3),
                **{f"limit_{part}_s": round(s, 4) for part, s in parts.items()},
            )  # fmt: skip
        if how == "streamed" and here.pretended is None:
            _trace(here, torch, step)
    finally:
        if how != "torch":
            optimizer.close()
        if not here.quick:
            import shutil

            shutil.rmtree(where, ignore_errors=True)


def _trace(here, torch, step):
    """One step in the profiler: calls in which the host waits for the GPU, a trace, and a picture of the streams."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    path = here.out / f"{here.check}.trace.json"
    profiled.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    waits = {}
    for event in events:
        if event.get("cat") == "cuda_runtime" and "Synchronize" in event["name"]:
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


@check(seconds=120, alone=True)
def resident_1b(here):
    _steps(here, "1b", "resident")


@check(seconds=120, alone=True)
def streamed_1b(here):
    _steps(here, "1b", "streamed")


@check(seconds=120, alone=True)
def drive_1b(here):
    _steps(here, "1b", "streamed", on="drive")


@check(seconds=120, alone=True)
def cached_1b(here):
    _steps(here, "1b", "resident", durability="none", state_cache=1 << 20 if here.quick else "16GB")


@check(seconds=150, alone=True, quick=False)
def streamed_7b(here):
    _steps(here, "7b", "streamed", state=4.1, state_format="q4", master="m24", durability="none")


@check(seconds=150, alone=True, quick=False)
def resident_7b(here):
    _steps(here, "7b", "resident", state=4.1, state_format="q4", master="m24", durability="none")
