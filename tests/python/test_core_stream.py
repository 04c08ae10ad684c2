"""Weights that stream through memory, at the level of smartinf._core: files of weights and layer windows."""

import ctypes
import gc
import os
import threading

import pytest
import torch

import smartinf
from smartinf import _core

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
STRIPE = 65536  # elements; the smallest
SHAPES = [[70_000], [300, 517], [1], [131_072], [99_999], [13]]
UNITS = [1, 2, 1, 1, 1]  # of SHAPES in each unit, in order; the first unit is resident
STREAMED = [1, 2, 3, 4]
FORWARD_AND_BACKWARD = STREAMED + STREAMED[::-1]


def directories(tmp_path, count):
    paths = [tmp_path / f"drive{i}" for i in range(count)]
    for path in paths:
        path.mkdir(exist_ok=True)
    return [str(path) for path in paths]


def random_values(elements, type, seed=0):
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)).to(TYPES[type])


def write(paths, values, lengths=None, finish=True, description="model"):
    """A file of weights, written parameter by parameter."""
    type = "f32" if values.dtype == torch.float32 else "bf16"
    weights = _core.Weights.create(
        paths, values.numel(), type, description, stripe_bytes=STRIPE * values.element_size()
    )
    first = 0
    for length in lengths or [values.numel()]:
        part = values[first : first + length].clone()
        weights.write(first, part.data_ptr(), length)
        first += length
    if finish:
        weights.finish()
    return weights


class Window:
    """A _core.LayerWindow with its memory."""

    def __init__(self, source, units, type, slots, resident=None, kept=(), shift=0):
        self.units = units
        self.dtype = TYPES[type]
        sizes = _core.window_slot_bytes(source, units, type, slots)
        self.memory = [torch.zeros(size + 8192, dtype=torch.uint8) for size in sizes]
        addresses = [-(-slot.data_ptr() // 4096) * 4096 + shift for slot in self.memory]
        self.resident = resident
        self.core = _core.LayerWindow(
            source,
            units,
            type,
            list(zip(addresses, sizes)),
            0 if resident is None else resident.data_ptr(),
            list(kept),
        )

    def get(self, unit):
        """A copy of its weights; it is held."""
        count = self.units[unit][1]
        size = torch.empty(0, dtype=self.dtype).element_size()
        view = (ctypes.c_char * (count * size)).from_address(self.core.get(unit))
        return torch.frombuffer(bytearray(view), dtype=self.dtype)

    def use(self, unit):
        weights = self.get(unit)
        self.core.release(unit)
        return weights

    def expect(self, order, values):
        self.core.start(order)
        for unit in order:
            first, count = self.units[unit]
            assert torch.equal(self.use(unit), values[first : first + count]), unit


def units_of(elements, count):
    borders = [elements * i // count for i in range(count + 1)]
    return [(a, b - a) for a, b in zip(borders, borders[1:])]


# ---- Files of weights.


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("drives", [1, 3])
def test_weights_come_back_through_a_window_bit_for_bit(drives, type, tmp_path):
    lengths = [1, 3, 65_535, 65_537, 200_001, 77, 131_072, 9]
    values = random_values(sum(lengths), type)
    paths = directories(tmp_path, drives)
    write(paths, values, lengths, description="Qwen\n\u00e4").close()
    source = _core.Weights.open(paths)
    assert (source.elements(), source.type(), source.description()) == (len(values), type, "Qwen\n\u00e4")
    assert source.subgroup_end(0) == STRIPE
    assert source.subgroup_end(len(values) - 1) == len(values)
    for shift in (0, 64):
        window = Window(source, units_of(len(values), 5), type, 2, shift=shift)
        window.expect([0, 1, 2, 3, 4, 3, 2, 1, 0], values)
        assert window.core.misses() == 0
        assert window.core.hits() == 9
    flat = torch.zeros(2 * STRIPE + 1, dtype=TYPES[type])
    source.load_weights(type, flat.data_ptr(), [(0, STRIPE + 1)])
    assert torch.equal(flat[:-1], values[: 2 * STRIPE])
    assert flat[-1] == 0
    source.close()


def test_what_was_just_written_may_be_read_and_is_cast(tmp_path):
    values = random_values(2 * STRIPE + 5, "f32")
    source = write(directories(tmp_path, 2), values)
    Window(source, units_of(len(values), 2), "bf16", 2).expect([0, 1], values.to(torch.bfloat16))


def test_a_unit_shares_a_stripe_with_the_resident_ones(tmp_path):
    values = random_values(6 * STRIPE, "bf16")
    source = write(directories(tmp_path, 2), values)
    units = units_of(len(values), 4)
    end = source.subgroup_end(units[0][1] - 1)
    resident = torch.zeros(end, dtype=torch.bfloat16)
    source.load_weights("bf16", resident.data_ptr(), units[:1])
    window = Window(source, units, "bf16", 2, resident, units[:1])
    window.expect([1, 2, 3, 2, 1], values)
    with pytest.raises(smartinf.UsageError, match="beyond"):
        Window(source, units, "bf16", 2, resident, [(0, len(values) + 1)])


def test_a_flipped_bit_is_an_error_that_names_the_file(tmp_path):
    values = random_values(6 * STRIPE, "bf16")
    paths = directories(tmp_path, 3)
    write(paths, values).close()
    file = os.path.join(paths[1], "weights")
    with open(file, "r+b") as data:
        data.seek(-5, os.SEEK_END)  # stripe 4
        byte = data.read(1)[0]
        data.seek(-5, os.SEEK_END)
        data.write(bytes([byte ^ 1]))
    source = _core.Weights.open(paths)
    window = Window(source, units_of(len(values), 6), "bf16", 2)
    with pytest.raises(smartinf.CorruptError) as raised:
        window.get(4)
    assert raised.value.path == file
    window.expect([0, 1, 2, 3, 5], values)
    out = torch.empty_like(values)
    with pytest.raises(smartinf.CorruptError, match="checksum"):
        source.load_weights("bf16", out.data_ptr())


def test_unfinished_and_missing_files_are_refused(tmp_path):
    values = random_values(3 * STRIPE, "bf16")
    paths = directories(tmp_path, 2)
    assert _core.Weights.open(paths) is None
    weights = write(paths, values, [5], finish=False)
    with pytest.raises(smartinf.UsageError, match="ascending order"):
        weights.write(6, values.data_ptr(), 1)
    with pytest.raises(smartinf.UsageError, match="5 of 196608"):
        weights.finish()
    with pytest.raises(smartinf.UsageError, match="not written yet"):
        weights.load_weights("bf16", values.data_ptr())
    with pytest.raises(smartinf.DeviceError, match="being written"):
        _core.Weights.open(paths)
    with pytest.raises(smartinf.DeviceError, match="in use"):
        _core.Weights.remove(paths)
    weights.close()
    with pytest.raises(smartinf.CorruptError, match="not written to their end"):
        _core.Weights.open(paths)
    write(paths, values).close()
    with pytest.raises(smartinf.MismatchError, match="not named"):
        _core.Weights.open(paths[:1])
    os.remove(os.path.join(paths[0], "weights"))
    with pytest.raises(smartinf.DeviceError) as raised:
        _core.Weights.open(paths)
    assert raised.value.path == os.path.join(paths[0], "weights")
    _core.Weights.remove(paths)
    assert _core.Weights.open(paths) is None
    with pytest.raises(smartinf.DeviceError, match="Make the directory"):
        write([str(tmp_path / "none")], values)
    with pytest.raises(smartinf.NoSpaceError):
        _core.Weights.create(paths, 1 << 50, "bf16", "", stripe_bytes=1 << 40)
    assert all(os.listdir(path) == [] for path in paths)


# ---- The weights of an updater.


class Run:
    """An updater over shapes whose first unit is resident, and a window over the others."""

    def __init__(self, tmp_path, devices=2, type="bf16", stream_weights=True, shapes=SHAPES, units=UNITS):
        self.type = type
        options = dict(
            devices=[{"path": path, "bandwidth": 1.0, "threads": 1} for path in directories(tmp_path, devices)],
            rule="adamw",
            subgroup_elements=65536,
            io_bytes=1 << 20,
            io_depth=4,
            stream_weights=stream_weights,
        )
        self.updater = _core.Updater(options, [f"p{i}" for i in range(len(shapes))], shapes)
        self.counts = counts = [torch.Size(shape).numel() for shape in shapes]
        self.elements = sum(counts)
        if self.updater.fresh():
            values = torch.randn(self.elements, generator=torch.Generator().manual_seed(3)).split(counts)
            values = [part.clone() for part in values]
            self.updater.initialize(lambda i: (values[i].data_ptr(), "f32"), "")
        self.units, first, at = [], 0, 0
        for parameters in units:
            count = sum(counts[at : at + parameters])
            self.units.append((first, count))
            first, at = first + count, at + parameters
        end = self.updater.subgroup_end(self.units[0][1] - 1)
        assert end % 65536 == 0 and end > self.units[0][1]
        self.resident = torch.zeros(end, dtype=TYPES[type])
        self.load_resident()
        self.window = Window(self.updater, self.units, type, 2, self.resident, self.units[:1])
        self.step = 0

    def load_resident(self):
        self.updater.load_weights(self.type, self.resident.data_ptr(), self.units[:1])

    def all_weights(self):
        flat = torch.empty(self.elements, dtype=TYPES[self.type])
        self.updater.load_weights(self.type, flat.data_ptr())
        return flat

    def start_update(self):
        self.step += 1
        gradient = torch.randn(self.elements, generator=torch.Generator().manual_seed(self.step))
        self.updater.begin_step()
        for i in reversed(range(len(self.counts))):
            first = sum(self.counts[:i])
            self.updater.put_gradients([i], [gradient[first:].data_ptr()], ["f32"])
        self.updater.finish_gradients(1.0)
        groups = [{"lr": 0.1, "weight_decay": 0.01, "step": self.step} for _ in self.counts]
        self.updater.start_update(
            self.step, 1.0, groups, self.type, self.resident.data_ptr(), kept=self.units[:1]
        )
        self.window.core.updated()

    def wait_resident(self):
        self.updater.wait_weights(0, self.units[0][1])


@pytest.mark.parametrize("type", TYPES)
def test_units_have_the_bits_of_the_step_that_is_being_made(type, tmp_path):
    run = Run(tmp_path, type=type)
    before = run.all_weights()
    run.window.expect(FORWARD_AND_BACKWARD, before)
    for _ in range(3):
        run.start_update()
        run.window.core.start(FORWARD_AND_BACKWARD)
        forward = [run.window.use(1)]
        run.updater.start_commit("")
        run.wait_resident()
        forward = [run.resident[: run.units[0][1]].clone(), *forward, *(run.window.use(unit) for unit in STREAMED[1:])]
        backward = [run.window.use(unit) for unit in STREAMED[::-1]]
        run.updater.wait_commit()
        after = run.all_weights()
        assert torch.equal(torch.cat(forward), after)
        assert torch.equal(torch.cat(backward[::-1]), after[run.units[1][0] :])
        assert not torch.equal(after, before)
        before = after
    assert run.window.core.misses() == 0
    run.updater.close()


def test_streamed_and_resident_weights_have_the_same_bits(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run, whole = Run(tmp_path / "a"), Run(tmp_path / "b", devices=1)
    for _ in range(2):
        for one in (run, whole):
            one.start_update()
            one.updater.start_commit("")
        run.window.expect(FORWARD_AND_BACKWARD, whole.all_weights())


def test_after_an_abort_units_are_those_of_the_committed_step(tmp_path):
    run = Run(tmp_path)
    before = run.all_weights()
    run.start_update()
    first, count = run.units[2]
    assert not torch.equal(run.window.use(2), before[first : first + count])
    run.updater.abort()
    run.window.core.updated()
    run.load_resident()
    run.window.expect(FORWARD_AND_BACKWARD, before)


def test_what_is_shared_with_a_long_resident_part_is_waited_for(tmp_path):
    run = Run(tmp_path, shapes=[[40 * STRIPE - 1000], [1000]], units=[1, 1])
    before = run.all_weights()
    run.start_update()
    seen = run.window.use(1)
    run.updater.start_commit("")
    run.updater.wait_commit()
    after = run.all_weights()
    assert torch.equal(seen, after[-1000:])
    assert not torch.equal(seen, before[-1000:])
    run.start_update()
    run.updater.abort()
    run.window.core.updated()
    run.load_resident()
    assert torch.equal(run.window.use(1), seen)


def test_another_order_is_read_at_once(tmp_path):
    run = Run(tmp_path)
    values = run.all_weights()
    run.window.core.start(STREAMED)
    for unit in [4, 1, 1, 3, 0, 2]:
        first, count = run.units[unit]
        assert torch.equal(run.window.use(unit), values[first : first + count])
    misses = run.window.core.misses()
    assert misses >= 3
    run.window.expect(FORWARD_AND_BACKWARD, values)
    assert run.window.core.misses() == misses


def test_wrong_uses_are_errors_and_nothing_is_lost(tmp_path):
    run = Run(tmp_path)
    window, values = run.window, run.all_weights()
    first, count = run.units[1]
    assert torch.equal(window.get(1), values[first : first + count])
    assert window.get(2).numel() == run.units[2][1]
    with pytest.raises(smartinf.UsageError, match="every slot of the layer window is held"):
        window.get(3)
    with pytest.raises(smartinf.UsageError, match="unit 1 is in use"):
        window.core.updated()
    with pytest.raises(smartinf.UsageError, match="unit 3 is released and was not got"):
        window.core.release(3)
    assert torch.equal(window.use(1), values[first : first + count])
    window.core.release(1)
    window.core.release(2)
    for call in (lambda: window.core.get(5), lambda: window.core.release(5), lambda: window.core.start([0, 5])):
        with pytest.raises(smartinf.UsageError, match="no unit 5 among 5"):
            call()
    window.expect(FORWARD_AND_BACKWARD, values)
    for units, what in [([(0, 0)], "unit 0"), ([(0, run.elements + 1)], "unit 0"), ([], "without units")]:
        with pytest.raises(smartinf.UsageError, match=what):
            _core.window_slot_bytes(run.updater, units, "bf16", 2)
    with pytest.raises(smartinf.UsageError, match="its units need"):
        size = _core.window_slot_bytes(run.updater, run.units, "bf16", 1)[0]
        _core.LayerWindow(run.updater, run.units, "bf16", [(window.memory[0].data_ptr(), size - 1)])
    with pytest.raises(smartinf.UsageError, match="no element"):
        run.updater.subgroup_end(run.elements)


def test_weights_are_not_fetched_without_the_option(tmp_path):
    run = Run(tmp_path, stream_weights=False)
    with pytest.raises(smartinf.UsageError, match="stream_weights"):
        run.window.get(1)


# ---- In which order things are closed.


def sources(tmp_path):
    (tmp_path / "run").mkdir()
    run = Run(tmp_path / "run")
    run.window.core.close()
    values = random_values(run.elements, "bf16")
    return [(run.updater, run.units, "the optimizer"), (write(directories(tmp_path, 2), values), run.units, "weights")]


@pytest.fixture
def freed_memory_is_overwritten():
    """So that a use of it does not go unseen."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        pytest.skip("the C library has no mallopt")
    perturb = -6
    libc.mallopt(perturb, 0xA5)
    yield
    libc.mallopt(perturb, 0)


def test_a_source_may_be_closed_before_its_windows(tmp_path, freed_memory_is_overwritten):
    for source, units, name in sources(tmp_path):
        window = Window(source, units, "bf16", 3)
        window.core.start([1, 2, 3])
        window.get(1)
        source.close()
        source.close()
        for call in (lambda: window.core.get(2), lambda: window.core.release(1), window.core.hits):
            with pytest.raises(smartinf.UsageError, match=f"{name} is closed"):
                call()
        window.core.close()
        with pytest.raises(smartinf.UsageError, match=f"{name} is closed"):
            Window(source, units, "bf16", 1)


def test_a_window_may_be_closed_or_forgotten_while_it_reads(tmp_path):
    for source, units, _ in sources(tmp_path):
        window = Window(source, units, "bf16", 2)
        window.core.start([0, 1, 2])
        window.core.close()
        window.core.close()
        with pytest.raises(smartinf.UsageError, match="the layer window is closed"):
            window.core.get(0)
        window = Window(source, units, "bf16", 2)
        window.core.start([0, 1, 2])
        core = window.core
        del window.core, window
        del core
        gc.collect()
        assert len(Window(source, units, "bf16", 1).use(1)) == units[1][1]
        source.close()


def test_a_window_keeps_its_source(tmp_path):
    values = random_values(3 * STRIPE, "bf16")
    paths = directories(tmp_path, 1)
    window = Window(write(paths, values), units_of(len(values), 3), "bf16", 2)
    gc.collect()
    window.expect([0, 1, 2], values)
    with pytest.raises(smartinf.DeviceError, match="in use"):
        _core.Weights.remove(paths)
    del window
    _core.Weights.remove(paths)


def test_threads_may_share_a_window(tmp_path):
    values = random_values(8 * STRIPE, "bf16")
    window = Window(write(directories(tmp_path, 2), values), units_of(len(values), 8), "bf16", 4)
    wrong = []

    def work(seed):
        for i in range(40):
            unit = (i * seed + seed) % 8
            first, count = window.units[unit]
            if not torch.equal(window.use(unit), values[first : first + count]):
                wrong.append(unit)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_can_do_no_harm(tmp_path):
    for source, units, name in sources(tmp_path):
        window = Window(source, units, "bf16", 1)
        expected = window.use(1)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for call in (lambda: window.core.get(1), source.count, lambda: source.subgroup_end(0)):
                    with pytest.raises(smartinf.UsageError, match="forked"):
                        call()
                window.core.close()
                source.close()
                del call, window, source
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(window.use(1), expected)
        source.close()
