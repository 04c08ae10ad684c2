"""What the kernels are estimated to take of a SmartSSD's FPGA. Counted from the source, not synthesized.

Usage: resources.py

Counted is, for each operator in kernels/*.h, what its bits take in an UltraScale+ device: a LUT for each bit of an adder
or of a choice among four, half of one for each bit of a choice among two or of a comparison (UG574); multipliers by the
27 x 18 bits of a DSP48E2, of which 26 x 17 are left without signs (UG579); 36 kbit of block RAM as 512 words of 72 bits
(UG573). Not counted: registers, control, and what the platform itself takes.
"""
import math
import sys

# Kintex UltraScale+ KU15P (product table XMP103).
DEVICE = {"LUT": 522720, "BRAM": 984, "URAM": 128, "DSP": 1968}
PAPER = {"LUT": 33.7, "BRAM": 27.1, "URAM": 34.4, "DSP": 11.0}  # Table III, Adam


def adder(bits):
    return bits


def choice(bits, among=2):
    return bits / 2 if among == 2 else bits * math.ceil((among - 1) / 3)


def shifter(bits):
    return 2 * choice(bits, 4) + choice(bits, 2)  # by 0 to 31


def dsps(a, b):
    return min(math.ceil(a / 26) * math.ceil(b / 17), math.ceil(b / 26) * math.ceil(a / 17))


# float32.h. zeros: counting leading zeros of n bits takes about n LUTs.
NORMALIZE = 24 + shifter(24) + adder(9)
ROUND = shifter(27) + adder(9) + adder(31)
SPECIAL = 30  # NaN, infinities, zeros
ADD = {"LUT": choice(31) + choice(64) + adder(8) + shifter(27) + adder(28) + 28 + shifter(27) + adder(9)
       + ROUND + SPECIAL}
MULTIPLY = {"LUT": 2 * NORMALIZE + adder(10) + choice(48) + ROUND + SPECIAL, "DSP": dsps(24, 24)}
# 26 steps of a difference and a choice; the root's differences grow from 3 to 28 bits.
DIVIDE = {"LUT": 2 * NORMALIZE + 26 * (adder(25) + choice(25)) + adder(10) + ROUND + SPECIAL}
ROOT = {"LUT": NORMALIZE + sum(adder(n) + choice(n) for n in range(3, 29)) + adder(10) + ROUND + SPECIAL}

# Operators of an element's update (smartinf/kernels/arithmetic.h), with the gradient's scale.
RULES = {"adam": (8, 6, 1, 1), "sgd": (6, 4, 0, 0), "adagrad": (4, 4, 1, 1)}
PLANES = {"adam": 3, "sgd": 2, "adagrad": 2}


def update(rule, cycles):
    lanes = 16 // cycles
    multiplies, adds, divides, roots = RULES[rule]
    operators = multiplies + adds + divides + roots
    lut = (multiplies * MULTIPLY["LUT"] + adds * ADD["LUT"] + divides * DIVIDE["LUT"] + roots * ROOT["LUT"]
           + choice(64, cycles) * operators * (cycles > 1)  # an operator's operands come from so many lanes
           + 3 * 32)  # lanes that stay, NaN
    return {"LUT": lanes * lut, "DSP": lanes * multiplies * MULTIPLY["DSP"]}


def digest(cycles):
    """sum_stripes and finish_digests of one plane, one way."""
    products = 8 // cycles if cycles < 8 else 1
    keys = 24 * adder(64)
    sums = {"LUT": keys + choice(24 * 64) + products * (64 + 2 * adder(64)) + choice(512), "DSP": products * dsps(32, 32)}
    finish = {"LUT": keys + 3 * adder(64) + 64 + choice(512, 8) + choice(32 * 32, 4),
              "DSP": dsps(64, 32) + dsps(32, 32) + 4 * dsps(32, 32) + dsps(64, 64)}
    return add(sums, finish)


def fifo(bits, depth):
    """Up to 32 deep in shift registers of LUTs."""
    return {"LUT": bits} if depth <= 32 else {"BRAM": math.ceil(bits / 72) * math.ceil(depth / 512)}


def port():
    """One direction of an AXI port of 512 bits: 16 bursts of 64 words may be under way. The LUTs are assumed."""
    return add(fifo(512, 1024), {"LUT": 1500})


def add(*parts):
    return {kind: sum(part.get(kind, 0) for part in parts) for kind in DEVICE}


def times(n, part):
    return {kind: n * value for kind, value in part.items()}


def kernel(rule, cycles):
    planes = PLANES[rule]
    return {
        "update": update(rule, cycles),
        "checksums": times(2 * planes, add(digest(cycles), fifo(512, 16))),
        "streams": add(times(2 * planes + 1, fifo(512, 64)), times(2 * planes, fifo(512, 16))),
        "ports": times(2 * planes + 4, port()),
        "new weights": {"LUT": 16 * (adder(32) + choice(16))},
        "dense gradient": add(fifo(512, 64), fifo(512, 16), port(), {"LUT": choice(512, 4)}),
    }


def decompressor():
    """The message kernel in place of the dense one."""
    wide = choice(64, 8) + 2 * 64 * 3  # a piece of a word, shifted by up to 63
    return add(times(3, add(port(), fifo(64, 64), {"LUT": wide})), times(2, port()), {"LUT": 2 * 64 * 3 + 64 + adder(64)},
               {"LUT": 3 * adder(32) + shifter(32) + choice(512)}, fifo(512, 16))


def main():
    rows = []
    for rule in RULES:
        for cycles in (1, 4):
            parts = kernel(rule, cycles)
            rows.append((f"{rule}, 16 elements in {cycles}", add(*parts.values())))
            if rule == "adam" and cycles == 4:
                rows += [(f"- of it {name}", add(part)) for name, part in parts.items()]
                rest = [part for name, part in parts.items() if name != "dense gradient"]
                rows.append(("- with the decompressor", add(*rest, decompressor())))
    print("| kernels | " + " | ".join(DEVICE) + " |\n|---|" + "---:|" * len(DEVICE))
    for name, part in rows:
        print(f"| {name} | " + " | ".join(
            f"{round(part[kind])} ({100 * part[kind] / DEVICE[kind]:.1f} %)" for kind in DEVICE) + " |")
    print("| the paper's, Adam (Table III) | " + " | ".join(f"{PAPER[kind]} %" for kind in DEVICE) + " |")


if __name__ == "__main__":
    sys.exit(main())
