"""Two ranks under torchrun on gloo, each owning half of the state, against one rank."""

import json
import pathlib
import random
import re
import shutil
import subprocess
import sys

import pytest
import torch
from nightly import nightly

import smartinf
from smartinf import _core, rank_calls

WORKER = str(pathlib.Path(__file__).with_name("ranks_worker.py"))
STEPS = 12


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.fixture(scope="module")
def run():
    """run(world, folder, **job): see ranks_worker.py. Returns what the ranks made."""
    server = subprocess.Popen(
        [sys.executable, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def run(world, folder, expect_death=False, torchrun=False, **job):
        folder.mkdir(exist_ok=True)
        job = {"devices": str(folder / "devices"), "results": str(folder), "last": STEPS, **job}
        job["world"] = world
        if torchrun:
            launch = [*TORCHRUN, f"--nproc-per-node={world}", WORKER, json.dumps(job)]
            done = subprocess.run(launch, capture_output=True, text=True, timeout=600)
            outcome = 9 if "Signal 9" in done.stderr else done.returncode
        else:
            server.stdin.write(json.dumps(job) + "\n")
            server.stdin.flush()
            outcome = int(server.stdout.readline().split()[1])
        if "stop" in job:
            return None  # nobody has come to the end
        assert outcome == (9 if expect_death else 0)
        return None if expect_death or job.keys() & {"check", "refused"} else torch.load(folder / f"w{world}.pt")

    yield run
    server.stdin.close()
    server.wait(timeout=600)


def assert_close(a, b):
    for name, value in a["model"].items():
        # The mean over ranks is added up in another order than the mean over the batch.
        apart = (value - b["model"][name]).abs()
        assert apart.max() < 1e-6, f"{name}: {(apart >= 1e-6).sum()} elements apart, by up to {apart.max()}"
    assert a["optimizer"]["state"].keys() == b["optimizer"]["state"].keys()
    for number, entry in a["optimizer"]["state"].items():
        other = b["optimizer"]["state"][number]
        assert entry["step"] == other["step"]
        apart = (entry["exp_avg"] - other["exp_avg"]).abs()
        assert apart.max() < 1e-8, f"momentum of {number}: apart by up to {apart.max()}"


def assert_same(a, b):
    for name, value in a["model"].items():
        assert torch.equal(value, b["model"][name]), name
    for number, entry in a["optimizer"]["state"].items():
        other = b["optimizer"]["state"][number]
        assert all(torch.equal(entry[key], other[key]) for key in entry)


@pytest.fixture(scope="module")
def one(run, tmp_path_factory):
    return run(1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(run, tmp_path_factory):
    return run(2, tmp_path_factory.mktemp("two"), torchrun=True)


def test_two_ranks_are_one(one, two):
    assert_close(two, one)


def test_a_killed_rank_costs_nothing(run, one, two, tmp_path):
    """One of two dies while the other commits what both have prepared: both come back to that step,
    and the end is that of the undisturbed run, bit for bit."""
    run(2, tmp_path, expect_death=True, kill=["commit", 2], save_after=1, patience=3)
    said = (tmp_path / "log0").read_text()
    assert re.search(r"rank 1 \(process \d+ on \S+\) has ended", said), said
    # Their checkpoint goes on with one rank, on its devices.
    alone = run(1, tmp_path / "one", load=str(tmp_path / "checkpoint"))
    assert_close(alone, one)
    assert_same(run(2, tmp_path), two)


def test_two_ranks_go_on_from_a_checkpoint(run, two, tmp_path):
    """And are one run from there on: what is resumed later has one history on all ranks."""
    run(2, tmp_path, last=3, save_after=2)
    saved = tmp_path / "checkpoint"
    assert sorted(path.name for path in saved.iterdir()) == ["checkpoint.json", "rank-0", "rank-1"]
    run(2, tmp_path / "on", last=4, load=str(saved))
    assert_same(run(2, tmp_path / "on"), two)


def test_two_ranks_add_a_parameter(run, two, tmp_path):
    """The state is laid out anew on both: elements change their owner, and the run goes on."""
    assert_close(run(2, tmp_path, add_after=3), two)
    assert [path.name for path in tmp_path.iterdir() if "add_param_group" in path.name] == []


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["update", "agree", "confirm", "weights", *["random"] * 4])
def test_a_rank_killed_at_another_moment(run, point, two, tmp_path):
    if point == "random":
        # Waits after the last step, so that death comes during training in any case.
        death = {"kill": [point, random.uniform(0, 0.3)], "stop_at": STEPS, "last": STEPS + 1}
        run(2, tmp_path, expect_death=True, torchrun=True, **death)
    else:
        run(2, tmp_path, expect_death=True, kill=[point, 3], patience=3)
        assert re.search(r"rank 1 \(process \d+ on \S+\) has ended", (tmp_path / "log0").read_text())
    assert_same(run(2, tmp_path), two)


def test_tables_have_the_rows_of_one_rank(run, tmp_path):
    """Whichever rank has a row's device, and also where a run goes on."""
    run(1, tmp_path / "one", check="tables")
    expected, _ = torch.load(tmp_path / "one" / "table0.pt")
    run(2, tmp_path / "two", check="tables", last=5)
    run(2, tmp_path / "two", check="tables")
    for rank in range(2):
        rows, said = torch.load(tmp_path / "two" / f"table{rank}.pt")
        assert torch.equal(rows, expected)
        assert "row 3000 in place 1 of a batch, and the table table has 3000 rows" in said and "rank 1" in said, said


def test_tables_go_on_from_a_checkpoint_with_any_number_of_ranks(run, tmp_path):
    """Two ranks and one take over from each other; two add a parameter."""
    tables = {"check": "tables", "rule": "adamw"}
    rows = lambda folder: torch.load(tmp_path / folder / "table0.pt")[0]
    run(1, tmp_path / "one", **tables)
    run(2, tmp_path / "two", **tables, save_after=4, add_after=6)
    assert torch.equal(rows("two"), rows("one"))
    before = tmp_path / "two" / "checkpoint"
    for world, last in ((2, 6), (1, 8), (2, STEPS)):
        run(world, tmp_path / f"to{last}", **tables, load=str(before), last=last, save_after=last)
        before = tmp_path / f"to{last}" / "checkpoint"
    assert torch.equal(rows(f"to{STEPS}"), rows("one"))


def test_gradients_are_averaged_as_they_leave(run, tmp_path):
    """Without DistributedDataParallel, over several backward passes, scaled, one step overflowing."""
    release = {"release_gradients": True, "accumulation_steps": 2}
    expected = run(1, tmp_path / "one", passes=2)
    made = run(
        2, tmp_path / "two", ddp=False, passes=2, options=release, scaler=True, overflow_at=3
    )
    assert_close(made, expected)
    assert "unused" in made["model"]


@pytest.mark.parametrize("world", [nightly(1), 2])
def test_between_devices_gradients_and_weights_have_the_same_bits(run, world, tmp_path):
    """With the CPU in a device's place, and gloo in that of NCCL; with one rank as well."""
    options = {"release_gradients": True}
    expected = run(world, tmp_path / "host", ddp=False, options=options)
    assert_same(run(world, tmp_path / "there", ddp=False, options=options, on_devices=True), expected)
    if world == 2:  # gradients that DistributedDataParallel has added up; sums over passes are in the host's memory
        assert_same(run(2, tmp_path / "ddp", on_devices=True), run(2, tmp_path / "host_ddp"))
        options["accumulation_steps"] = 2
        expected = run(2, tmp_path / "sums", ddp=False, passes=2, options=options)
        assert_same(run(2, tmp_path / "sums_there", ddp=False, passes=2, options=options, on_devices=True), expected)


@pytest.mark.parametrize("point", [nightly("weights"), "agree"])
def test_a_rank_that_hangs_is_named_when_the_groups_timeout_has_passed(run, point, two, tmp_path):
    """It is stopped between prepare and commit ("agree"): what the other prepared is committed when both are back. Or
    when the step is committed and the other waits for its new weights."""
    run(2, tmp_path, stop=[point, 2], timeout=10)
    said = tmp_path / "log0"
    assert re.search(r"rank 1 \(process \d+ on \S+\) has not answered for 10 s", said.read_text())
    assert said.stat().st_mtime - (tmp_path / "stopped").stat().st_mtime < 30
    assert_same(run(2, tmp_path), two)


@pytest.mark.parametrize(("how", "said"), [("dies", " has ended"), ("gives up", r": the drive is gone\.")])
def test_two_others_name_the_third_rank(run, how, said, tmp_path):
    run(3, tmp_path, expect_death=True, check="missing", how=how, patience=8)
    for rank in range(2):
        text = (tmp_path / f"said{rank}").read_text()
        assert re.match(r"rank 2 \(process \d+ on \S+\)" + said, text), text


@pytest.mark.parametrize(
    ("call", "world", "release"),
    [nightly("save_checkpoint", 2, True), nightly("load_checkpoint", 2, True), ("load_state_dict", 2, False), ("full_state_dict", 3, True)],
)
def test_ranks_at_different_calls_say_which(run, call, world, release, tmp_path):
    """One rank has a batch less. Nobody ends by a signal, and all go on from one step."""
    run(world, tmp_path, check="unequal", call=call, release=release, timeout=6, patience=8)
    for rank in range(world):
        said = (tmp_path / f"{call}{rank}").read_text()
        places = rf"rank \d \(process \d+ on \S+\) is at a step, and rank {world - 1} \(.*\) is at {call}\(\)"
        assert re.search(f"not at the same call: {places}.*resume=True", said), said
    for file in tmp_path.glob("before*"):
        shutil.rmtree(file)
    run(world, tmp_path, check="unequal", call=call, release=release, timeout=6, patience=8)
    assert {(tmp_path / f"{call}{rank}").read_text().split()[0] for rank in range(world)} == {"2"}


@pytest.mark.parametrize("error", [nightly("OSError"), "RuntimeError"])
def test_what_a_process_group_raises_is_said_by_all_ranks(run, error, tmp_path):
    """At once and in all later calls, with the rank's name."""
    run(2, tmp_path, check="raises", error=error)
    for rank in range(2):
        first, later = ((tmp_path / f"{call}{rank}").read_text() for call in ("first", "later"))
        assert re.search(r"rank [01] \(process \d+ on \S+\)", first), first
        assert "the network card is gone" in first and later == first


def test_after_an_interrupt_no_other_message_is_exchanged(monkeypatch):
    """Those of the interrupted call may still come, and would be taken for the next one's."""
    monkeypatch.setattr(rank_calls, "_store_of", lambda group: None)

    class Message:
        error = None

        def wait(self):
            if self.error:
                raise self.error

    class Group:
        def send(self, tensors, *_):
            self.sent = tensors[0]
            return Message()

        def recv(self, tensors, *_):
            tensors[0].copy_(self.sent)
            return Message()

    calls = rank_calls.RankCalls([0, 1], 0, Group, timeout=60)
    parts = [torch.zeros(3), torch.zeros(3)]
    calls.all_gather_tensors(Group(), parts)
    monkeypatch.setattr(Message, "error", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        calls.all_gather_tensors(Group(), parts)
    monkeypatch.setattr(Message, "error", None)
    for call in (lambda: calls.all_gather_tensors(Group(), parts), lambda: calls.all_gather(0, b"text")):
        with pytest.raises(smartinf.DeviceError, match="a call to the other ranks was interrupted.*resume=True"):
            call()


def test_torchs_own_sums_say_what_has_failed_first(monkeypatch):
    class Store:
        check = staticmethod(lambda keys: True)
        compare_set = staticmethod(lambda key, _, mine: b"rank 1 (process 7 on here): the drive is gone")

    class Group:
        pass

    monkeypatch.setattr(rank_calls.RankCalls, "all_gather", lambda self, channel, mine: [mine, mine])
    for store, said in ((Store(), "rank 1 .process 7.*the drive is gone"), (None, "a sum over the ranks failed .Closed.")):
        monkeypatch.setattr(rank_calls, "_store_of", lambda group, store=store: store)
        calls = rank_calls.RankCalls([0, 1], 0, Group, timeout=60)
        assert calls.of_torch(lambda: 5) == 5
        for call in (lambda: calls.of_torch(raising(RuntimeError("[source.cc:3] Closed\nmore"))), lambda: calls.of_torch(None)):
            with pytest.raises(smartinf.DeviceError, match=f"{said}.*resume=True"):
                call()


class OddError(Exception):
    code = 404  # of another package: no name of the core's

    def __str__(self):
        return "" + self.args[0]


def raising(error):
    def call(*_):
        raise error

    return call


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (raising(ValueError("a wrong shape")), "ValueError: a wrong shape"),
        (raising(AssertionError()), "AssertionError"),
        (raising(OddError("not found")), "OddError: not found"),
        (raising(OddError(1)), "TypeError"),  # its text cannot be made
        (lambda *_: [b"too short"], "another number of bytes"),
        (lambda *_: ["text"], "something else than bytes"),
        (lambda *_: [], "IndexError"),
        (lambda *_: None, "TypeError"),
    ],
)
def test_whatever_a_collective_call_raises_is_an_error_of_the_core(answer, said):
    """In the calls from Python, and in those of the core's own threads."""

    class Calls:
        all_gather = staticmethod(answer)
        failed = raising(ValueError("also here"))

    ranks = _core.Ranks(0, 1, Calls())
    with pytest.raises(smartinf.DeviceError, match=said):
        ranks.all_ok("a call", None)


def test_an_interrupted_collective_call_stays_an_interrupt():
    class Calls:
        all_gather = staticmethod(raising(KeyboardInterrupt()))

    ranks = _core.Ranks(0, 1, Calls())
    with pytest.raises(KeyboardInterrupt):
        ranks.all_ok("a call", None)


def test_devices_of_different_runs_are_refused(run, tmp_path):
    """Rank 1's are replaced by those of another run, of the same step; and by none. (The first weights are step 0, and
    what DistributedDataParallel then writes are the same.)"""
    for name in ("a", "b"):
        run(2, tmp_path / name, last=2)
    mine, other = tmp_path / "a/devices/rank1", tmp_path / "b/devices/rank1"
    mine.rename(tmp_path / "kept")
    other.rename(mine)
    run(2, tmp_path / "a", refused="states of different runs")
    mine.rename(other)
    run(2, tmp_path / "a", refused="rank 0: step 2, rank 1: empty")


if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)
