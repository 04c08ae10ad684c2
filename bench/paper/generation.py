#!/usr/bin/env python3
"""Ratios that are known of attention near storage (INF^2, arXiv 2502.09921, and its later version HILOS, ASPLOS 2026),
beside `smartinf simulate --generate`.

    bench/paper/generation.py [--json] [--markdown]

The papers' notes give ratios and their ranges, and few of the settings behind them: each is taken here over OPT models of
30, 66 and 175 billion parameters and prompts of 8k to 128k tokens (the first version: to 32k), where no setting is given. A
bound of a range is compared with that of the simulated ratios. What the machine is, the constants below say; power is not
simulated. SMARTINF names the binary [build/release/bin/smartinf].
"""
import argparse
import functools
import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from runs import rows_of, text_of, values_in, with_values  # pylint: disable=wrong-import-position

MODELS = {"30B": (48, 7168, 56), "66B": (64, 9216, 72), "175B": (96, 12288, 96)}  # layers, width, heads
CONTEXTS = (8192, 16384, 32768, 65536, 131072)
FIRST_CONTEXTS = CONTEXTS[:3]
BATCH = 16
TOKENS = 64
LIFE_BYTES = 7.008e15  # of each drive: one drive write a day for five years
# The devices: SmartSSDs behind one PCIe expansion, an A100 of 40 GB.
NEAR = {
    "device.read_bytes_per_s": 3.0e9,  # given: peer to peer, 48 GB/s of 16
    "device.fold_bytes_per_s": 3.0e9,  # given: at least that, whatever the queries of a head
    "host.link_bytes_per_s": 16e9,     # given: of the expansion, with which alpha is computed
    "gpu.link_bytes_per_s": 24e9,      # assumed: three quarters of the label of PCIe 4.0 x16
    "device.latency_s": 430e-6,        # fitted to one row: write-back gains 1.32
    "software.buffered_row_s": 30e-6,  # fitted to one row: spilling every 64 tokens loses 30 %
}
# FlexGen on four ordinary drives: through the page cache and copying threads.
BASELINE = {
    "device.count": 4,
    "device.read_bytes_per_s": 6.9e9,  # data sheet
    "device.write_bytes_per_s": 4.1e9,
    "device.link_bytes_per_s": 6.9e9,
    "device.latency_s": 0.0,
    "host.link_bytes_per_s": 27.6e9,   # lanes of their own
    "gpu.link_bytes_per_s": 24e9,
    "host.copy_bytes_per_s": 6.9e9,    # fitted to one row: eight devices are 3.39 times as fast
}
FIRST_COPY_BYTES_PER_S = 17.6e9  # of the first version's baseline; fitted to one row: 2.67 for 30B
INPUT_SHARE = 0.5              # given: about half, rounded to a power of two
INPUT_MEMORY = 256e9           # of the first version's inputs, assumed
ANS = ("--in-turn", "attention", "--write-back", 1)
WRITE_BACK = ("--in-turn", "attention", "--write-back", 16)
INPUTS = (*ANS, "--inputs", "auto")
# The first version writes two tokens at once, and keeps inputs in the host's memory.
FIRST = ("--in-turn", "attention", "--write-back", 2)
FETCHING = ("--in-turn", "attention", "--attention", "host")


@functools.cache
def file_of(kind, devices, folder):
    """The machine file of NEAR, or of a baseline."""
    values = dict(NEAR if kind == "near" else BASELINE)
    values.setdefault("device.count", devices)
    if kind == "first":
        values["host.copy_bytes_per_s"] = FIRST_COPY_BYTES_PER_S
    text = with_values(text_of("simulate", "--machine", "smartssd-a100", "--print-machine"), values)
    path = pathlib.Path(folder) / f"{kind}{devices}.toml"
    path.write_text(text, encoding="utf-8")
    return path


class Simulator:
    def __init__(self, folder):
        self.folder = folder

    @functools.cache
    def step(self, model, context, devices, flags, kind="near", tokens=TOKENS):
        layers, width, heads = MODELS[model]
        config = pathlib.Path(self.folder) / f"opt-{model}.json"
        if not config.exists():
            config.write_text(json.dumps({
                "model_type": "opt", "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
                "ffn_dim": 4 * width, "vocab_size": 50272, "max_position_embeddings": 1 << 20,
                "word_embed_proj_dim": width}), encoding="utf-8")
        # Weights of more than 100 billion parameters are on the drives.
        memory = ("--memory", "128GB") if model == "175B" else ()
        return rows_of("simulate", "--generate", config, "--machine", file_of(kind, devices, self.folder), "--context",
                       context, "--tokens", tokens, "--sequences", BATCH, *memory, *flags, "--json")[0]

    def ratios(self, flags, against, devices=8, models=tuple(MODELS), contexts=CONTEXTS, kind="baseline", of=None):
        """By model and context. of: a number of the step's row [tokens/s]."""
        of = of or (lambda row: row["tokens_per_s"])
        for model in models:
            for context in contexts:
                its_flags = flags(self, model, context) if callable(flags) else flags
                here = self.step(model, context, devices, its_flags)
                there = (self.step(model, context, 4, FETCHING, kind) if against == FETCHING
                         else self.step(model, context, devices, against))
                yield of(here) / of(there)

    def alpha(self, devices):
        """The share of inputs, where nothing but drives and links takes time."""
        ideal = {**NEAR, "device.fold_bytes_per_s": 1e18, "gpu.peak_flops": 1e18, "gpu.memory_bytes_per_s": 1e18,
                 "device.latency_s": 0.0, "host.copy_bytes_per_s": 1e18, "device.link_bytes_per_s": 1e18,
                 "gpu.link_bytes_per_s": 1e18, "device.mixed_efficiency": 1.0, "device.count": devices}
        path = pathlib.Path(self.folder) / f"ideal{devices}.toml"
        path.write_text(with_values(text_of("simulate", "--machine", "smartssd-a100", "--print-machine"), ideal))
        words = ("simulate", "--generate", "gpt2-8.4B", "--context", 512, "--sequences", 16, "--machine", path, "--json")
        with_inputs, = rows_of(*words, "--inputs", "auto")
        without, = rows_of(*words)
        return with_inputs["inputs"], without["step_s"] / with_inputs["step_s"]

    def requests(self, model, context, tokens, devices, flags):
        """Served until the drives are worn."""
        step = self.step(model, context, devices, flags, tokens=tokens)
        # Of a token of all: a step's; a prompt writes as many for each of its tokens.
        written = step["drive_written_bytes"] / BATCH * (context + tokens)
        return devices * LIFE_BYTES / written


def bounds(values):
    values = list(values)
    return min(values), max(values)


def in_memory(flags):
    """The first version's inputs, as many as memory holds, of at most the best share."""
    def with_share(simulator, model, context):
        layers, width, _ = MODELS[model]
        flags_there = (*flags, "--inputs-in-memory", "true")
        best = simulator.step(model, context, 16, (*flags_there, "--inputs", "auto"))["inputs"]
        return (*flags_there, "--inputs", min(best, INPUT_MEMORY / (BATCH * context * layers * width * 2)))
    return with_share


def fetched(row):
    """Bytes that the host reads in a step."""
    return row["link_up_bytes"] + row["weights_read_bytes"]


def rows(simulator):
    """(case, against, low and high as given, low and high as simulated, how)"""
    one = simulator.ratios
    yield "attention near storage", "FlexGen on drives", None, 3.39, *bounds(one(ANS, FETCHING)), "fitted"
    yield "+ delayed write-back", "near storage", None, 1.32, *bounds(one(WRITE_BACK, ANS)), "fitted"
    yield "+ inputs of layers", "near storage", None, 1.64, *bounds(one(INPUTS, ANS)), "predicted"
    first = functools.partial(one, devices=16, contexts=FIRST_CONTEXTS, kind="first")
    for model, given, how in (("30B", 2.67, "fitted"), ("175B", 2.3, "predicted")):
        _, found = bounds(first(FIRST, FETCHING, models=(model,)))
        yield f"first version, {model}", "baseline", given, given, found, found, how
    late = ("--in-turn", "attention", "--write-back", 16)
    yield "first version + inputs", "near storage", 1.07, 1.19, *bounds(first(in_memory(FIRST), FIRST)), "predicted"
    yield "first version + write-back", "near storage", 1.10, 1.12, *bounds(first(late, FIRST)), "predicted"
    yield "first version + both", "near storage", 1.1, 1.57, *bounds(first(in_memory(late), FIRST)), "predicted"
    saved = max(100 * (1 - ratio) for ratio in first(in_memory(late), FETCHING, models=("175B",), of=fetched))
    yield "first version, read bytes saved, %", "baseline", None, 88, None, saved, "predicted"
    for devices, alpha, gain in ((16, 0.5, 4 / 3), (8, 0.8, 5 / 3)):
        share, faster = simulator.alpha(devices)
        yield f"alpha, {devices} devices", "", alpha, alpha, share, share, "formula"
        yield f"ideal gain, {devices} devices", "near storage", gain, gain, faster, faster, "formula"
    rare = ("--in-turn", "attention", "--write-back", 64)
    lost = max(100 * (1 - ratio) for ratio in one(rare, WRITE_BACK))
    yield "write-back every 64, lost, %", "every 16", 30, None, lost, None, "fitted"
    of = functools.partial(simulator.requests, "175B", 8192, 350)
    both = (*WRITE_BACK, "--inputs", INPUT_SHARE)
    worn = of(16, both) / of(16, WRITE_BACK)
    yield "requests until worn", "without inputs", 1.34, 1.47, worn, worn, "predicted"
    rarer = ("--in-turn", "attention", "--write-back", 32, "--inputs", INPUT_SHARE)
    worn = of(16, rarer) / of(16, both)
    yield "requests, write-back every 32", "every 16", 1.02, 1.05, worn, worn, "predicted"
    served = of(16, both) / 1e6
    yield "requests until worn, 175B, million", "", 4.08, 4.08, served, served, "predicted"


def simulated():
    """The rows with the error of each bound that is given: of the worse one."""
    done = []
    with tempfile.TemporaryDirectory() as folder:
        for case, against, low, high, lowest, highest, how in rows(Simulator(folder)):
            errors = [found / given - 1 for given, found in ((low, lowest), (high, highest)) if given is not None]
            done.append({"case": case, "against": against, "low": low, "high": high, "simulated_low": lowest,
                         "simulated_high": highest, "how": how, "error": max(errors, key=abs)})
    file_of.cache_clear()
    return done


def errors_of(some):
    errors = [100 * abs(one["error"]) for one in some]
    return f"{len(errors):2} rows, mean {sum(errors) / len(errors):4.1f} %, worst {max(errors):4.1f} %"


def text_range(low, high):
    if low == high:
        return f"{low:.3g}"
    if low is None or high is None:
        return f"at most {high:.3g}" if low is None else f"at least {low:.3g}"
    return f"{low:.3g} to {high:.3g}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/simulator.md")
    options = parser.parse_args()
    all_rows = simulated()
    for one in all_rows:
        given = text_range(one["low"], one["high"])
        found = text_range(one["simulated_low"], one["simulated_high"])
        if options.json:
            print(json.dumps(one))
        elif options.markdown:
            print(f"| {one['case']} | {one['against']} | {given} | {found} | {100 * one['error']:+.0f} % | {one['how']} |")
        else:
            print(f"{one['case']:34} {one['against']:18} given {given:13} simulated {found:14} "
                  f"{100 * one['error']:+6.1f} %  {one['how']}")
    if not options.json:
        for how in ("predicted", "formula", "fitted"):
            print(f"{how:9}", errors_of([one for one in all_rows if one["how"] == how]))
        print("all      ", errors_of(all_rows))


if __name__ == "__main__":
    main()
