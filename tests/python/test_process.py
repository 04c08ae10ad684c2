"""The optimizer as a guest in a process: import, signals, fork, exit, a failing device."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import smartinf


def run(code, *args, timeout=120, **kwargs):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        **kwargs,
    )


def test_import_is_fast_and_takes_no_torch():
    code = """
        import sys, time
        start = time.process_time()
        import smartinf
        print(time.process_time() - start)
        assert "torch" not in sys.modules
        assert "AdamW" in dir(smartinf)
    """
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.5


TRAIN = """
    import signal, sys, time
    import torch, smartinf

    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(500_000)) for _ in range(4)]
    optimizer = smartinf.AdamW(params, devices=[sys.argv[1]], resume=True)
    print("ready", flush=True)
"""


def test_exit_with_open_devices_is_clean(device):
    code = TRAIN + """
    for p in params: p.grad = torch.ones_like(p)
    optimizer.step()  # its commit is still under way when the interpreter ends
    """
    for updates in (1, 2):
        done = run(code, device)
        assert done.returncode == 0
        assert done.stderr == ""
        params = [torch.nn.Parameter(torch.zeros(500_000)) for _ in range(4)]
        optimizer = smartinf.AdamW(params, devices=[device], resume=True)
        assert optimizer._lineage.updates == updates
        optimizer.close()


def test_ctrl_c_leaves_a_whole_step(device):
    code = TRAIN + """
    try:
        while True:
            for p in params: p.grad = torch.randn_like(p)
            optimizer.step()
    except KeyboardInterrupt:
        # Weights are those of the committed step, and training could go on.
        ours = [p.detach().clone() for p in params]
        def check(name, param, entry):
            assert torch.equal(entry["master"], param.detach()), name
        optimizer.visit_full_state(check)
        optimizer.step()
        optimizer.close()
        print("whole", flush=True)
    """
    for wait in (0.05, 0.31, 0.53):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), device],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout.readline() == "ready\n"
        time.sleep(wait)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
        assert out == "whole\n", err


def test_fork_and_dataloader_workers_do_no_harm(device):
    model = torch.nn.Linear(10, 10)
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    dataset = torch.utils.data.TensorDataset(torch.randn(64, 10))
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=16, num_workers=2, multiprocessing_context="fork"
    )
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            optimizer.step()
        except smartinf.UsageError as error:
            code = 0 if "forked" in str(error) else 2
        del optimizer
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    optimizer.step()
    assert optimizer._lineage.updates == 5


def test_the_gil_is_free_during_a_step(device):
    """A Python thread makes progress while step() waits for devices."""
    import threading

    params = [torch.nn.Parameter(torch.zeros(4_000_000))]
    optimizer = smartinf.AdamW(params, devices=[device])
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0.001)

    params[0].grad = torch.ones_like(params[0])
    thread = threading.Thread(target=count)
    thread.start()
    counts = []
    for _ in range(3):
        before, start = counted[0], time.monotonic()
        optimizer.step()
        optimizer.synchronize()
        counts.append((counted[0] - before) / (time.monotonic() - start))
    stop.set()
    thread.join()
    assert max(counts) > 50  # a second; with the GIL held it would be about none


def test_a_full_device_is_found_before_the_first_step(device):
    with pytest.raises(smartinf.NoSpaceError) as raised:
        smartinf.AdamW(
            [torch.nn.Parameter(torch.zeros(1 << 20))],
            devices=[{"path": device, "capacity_bytes": 1 << 20}],
        )
    assert raised.value.code == "no space"
    assert raised.value.advice


def test_a_closed_optimizer_says_so(device):
    param = torch.nn.Parameter(torch.zeros(4))
    with_grad = smartinf.AdamW([param], devices=[device])
    with_grad.close()
    with_grad.close()
    param.grad = torch.ones(4)
    with pytest.raises(smartinf.UsageError, match="closed"):
        with_grad.step()
