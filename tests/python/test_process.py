"""The optimizer as a guest in a process: import, signals, fork, exit, a failing device."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import smartinf
from smartinf import open_optimizers


def test_import_takes_no_torch():
    """What makes it slow is other packages (docs/results/python.md has the time)."""
    code = """
        import sys
        import smartinf
        heavy = {"torch", "numpy", "transformers", "tqdm", "asyncio", "multiprocessing"} & set(sys.modules)
        assert not heavy, heavy
        assert "AdamW" in dir(smartinf)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


TRAIN = """
    import signal, sys, time
    import torch, smartinf

    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(500_000)) for _ in range(4)]
    optimizer = smartinf.AdamW(params, devices=[sys.argv[1]], resume=True)
"""


def test_exit_with_open_devices_is_clean(processes, device):
    code = TRAIN + """
    for p in params: p.grad = torch.ones_like(p)
    optimizer.step()  # its commit is still under way when the interpreter ends
    """
    for updates in (1, 2):
        done = processes.run(code, device)
        assert done.returncode == 0
        assert done.stderr == ""
        params = [torch.nn.Parameter(torch.zeros(500_000)) for _ in range(4)]
        optimizer = smartinf.AdamW(params, devices=[device], resume=True)
        assert optimizer._session.lineage.updates == updates
        optimizer.close()


def test_ctrl_c_leaves_a_whole_step(processes, device):
    code = TRAIN + """
    try:
        print("ready", flush=True)
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
        child = processes.start(code, device)
        assert child.stdout.readline() == "ready\n"
        time.sleep(wait)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate()
        assert out == "whole\n", err


def test_a_signal_handler_that_saves_is_refused(device, tmp_path, monkeypatch):
    """In the middle of a step, and of another call, for whose end it would wait for ever."""
    param = torch.nn.Parameter(torch.zeros(100))
    optimizer = smartinf.AdamW([param], lr=1e-2, devices=[device])
    said, heard = [], threading.Event()

    def save(*_):
        try:
            optimizer.save_checkpoint(tmp_path / "checkpoint")
        except smartinf.UsageError as error:
            said.append(str(error))
        heard.set()

    def visit(name, parameter, entry):
        if not heard.is_set():
            signal.raise_signal(signal.SIGUSR1)
            assert heard.wait(600)

    session = optimizer._session
    norm = session.gradient_norm

    def interrupted(unscale):
        signal.raise_signal(signal.SIGUSR1)
        return norm(unscale)

    before = signal.signal(signal.SIGUSR1, save)
    try:
        param.grad = torch.ones(100)
        monkeypatch.setattr(session, "gradient_norm", interrupted)
        optimizer.step()
        assert heard.is_set()
        heard.clear()
        optimizer.visit_full_state(visit)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "save_checkpoint() by a signal handler that has interrupted step()" in said[0]
    assert "a signal handler has interrupted a call" in said[1]
    assert session.lineage.updates == 1
    assert float(param.detach().abs().min()) > 0  # the step was made
    optimizer.save_checkpoint(tmp_path / "checkpoint")


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
    assert optimizer._session.lineage.updates == 5


class Watched:
    """The core, with a note of the calls in which another Python thread has moved."""

    def __init__(self, core, moves):
        self.core, self.moves, self.seen = core, moves, set()

    def __getattr__(self, name):
        method = getattr(self.core, name)

        def call(*args):
            before = self.moves[0]
            made = method(*args)
            if self.moves[0] != before:
                self.seen.add(name)
            return made

        return call


def test_the_gil_is_free_while_the_core_works(device):
    """Nobody takes the GIL away here, so the other thread moves only where a call lets go of it. How
    often it then gets a processor is the machine's business: once in each call is enough."""
    param = torch.nn.Parameter(torch.zeros(4_000_000))
    optimizer = smartinf.AdamW([param], devices=[device])
    param.grad = torch.ones_like(param)
    long_calls = {"put_gradients", "wait_weights", "wait_commit"}
    moves, stop = [0], threading.Event()

    def move():
        while not stop.is_set():
            moves[0] += 1
            time.sleep(0)  # lets go of the GIL and asks for it again

    thread = threading.Thread(target=move)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        thread.start()
        optimizer._session.core = watched = Watched(optimizer._session.core, moves)
        for _ in range(200):
            optimizer.step()
            optimizer.synchronize()
            if long_calls <= watched.seen:
                break
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert long_calls <= watched.seen


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


def test_a_forked_child_of_a_killed_process_does_not_hold_the_device(processes, device):
    """As a DataLoader's worker that outlives its parent."""
    code = TRAIN + """
    import os
    child = os.fork()
    if child == 0:
        print("child", os.getpid(), flush=True)
        time.sleep(600)
        os._exit(0)
    time.sleep(600)
    """
    parent = processes.start(code, device)
    child = int(parent.stdout.readline().split()[1])
    try:
        params = [torch.nn.Parameter(torch.zeros(500_000)) for _ in range(4)]
        with pytest.raises(smartinf.DeviceError, match=f"process {parent.pid}"):
            smartinf.AdamW(params, devices=[device], resume=True)
        parent.kill()
        parent.wait()
        os.kill(child, 0)  # it lives
        smartinf.AdamW(params, devices=[device], resume=True).close()
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


class FailsOnce:
    """The core; each call in `calls` fails the first time."""

    def __init__(self, core, calls):
        self.core, self.calls = core, set(calls)

    def __getattr__(self, name):
        if name in self.calls:
            self.calls.remove(name)

            def fail(*_):
                raise smartinf.DeviceError(f"{name} failed")

            return fail
        return getattr(self.core, name)


@pytest.mark.parametrize(
    "calls",
    [("finish_gradients", "abort"), ("start_commit", "abort"), ("start_commit", "load_weights")],
)
def test_a_recovery_that_fails_is_made_up_for(calls, device, tmp_path):
    """By the next call, whichever it is: the step is then made on the weights and state before it."""
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 1000)) for _ in range(2))
    optimizer = smartinf.AdamW([ours], lr=1e-2, devices=[device])
    undisturbed = smartinf.AdamW([theirs], lr=1e-2, devices=[str(tmp_path / "undisturbed")])
    for n in range(3):
        ours.grad, theirs.grad = torch.full_like(ours, 0.1 + n), torch.full_like(theirs, 0.1 + n)
        if n == 1:
            optimizer._session.core = FailsOnce(optimizer._session.core, calls)
            with pytest.raises(smartinf.DeviceError, match=f"{calls[0]} failed") as raised:
                optimizer.step()
            assert f"{calls[1]} failed" in raised.value.__notes__[0]
        optimizer.step()
        undisturbed.step()
        assert torch.equal(ours, theirs)


class Slow:
    """The core, with a pause in the middle of a step."""

    def __init__(self, core, entered):
        self.core, self.entered = core, entered

    def __getattr__(self, name):
        if name == "start_update":
            self.entered.set()
            time.sleep(0.3)
        return getattr(self.core, name)


def test_the_end_waits_for_a_step_of_another_thread(device):
    """As of a daemon thread, when the interpreter ends: the core is not taken away from under it."""
    param = torch.nn.Parameter(torch.zeros(1000))
    param.grad = torch.ones_like(param)
    optimizer = smartinf.AdamW([param], devices=[device])
    entered, raised = threading.Event(), []
    optimizer._session.core = Slow(optimizer._session.core, entered)

    def work():
        try:
            optimizer.step()
            optimizer.step()
        except smartinf.Error as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(60)
    open_optimizers.close_all()
    thread.join()
    assert [str(error) for error in raised if "closed" not in str(error)] == []
    again = smartinf.AdamW([param], devices=[device], resume=True)
    assert again._session.lineage.updates >= 1


RUNNING_THREAD = """
    import sys, threading, time
    import torch, smartinf

    params = [torch.nn.Parameter(torch.randn(500_000)) for _ in range(4)]
    optimizer = smartinf.AdamW(params, devices=[sys.argv[1]], resume=False)

    for p in params: p.grad = torch.ones_like(p)

    def steps():
        while True:
            try:
                optimizer.step()
            except (smartinf.Error, RuntimeError) as error:
                ended.append(str(error))
                return

    ended = []
    thread = threading.Thread(target=steps, daemon=True)
    thread.start()
    time.sleep(float(sys.argv[2]))
"""


def test_close_beside_a_step_of_another_thread(processes, device):
    """The call that is under way ends before the devices go; the next one says that they are gone."""
    code = RUNNING_THREAD + """
    optimizer.close()
    thread.join(60)
    assert len(ended) == 1 and "closed" in ended[0], ended
    """
    for wait in ("0.3", "0.305"):
        done = processes.run(code, device, wait)
        assert done.returncode == 0, done.stderr


def test_exit_beside_a_step_of_a_daemon_thread(processes, device):
    for wait in ("0.3", "0.307"):
        done = processes.run(RUNNING_THREAD, device, wait)
        assert done.returncode == 0, done.stderr
        assert "terminate" not in done.stderr
