#!/usr/bin/env python3
"""Steps of our stages (rank_worker) over links of limited rate, where computing sleeps: points for the simulator to meet.

    bench/pipeline_points.py --worker build/release/bin/rank_worker [--points 0-8] [--repeats 5] > rows.jsonl

Each rank is a process in a network namespace; every two are joined by a veth pair of --rate in each direction (tc tbf). A
message has the bytes that take c = share x (f + b of the first stage) on the link; some points compress them, for which the
link's thread computes. A line of JSON for each point, medians of --repeats steps. Needs root. sim_tests simulate the rows
(PipelineStep.MeasuredStepsAreMet).
"""
import argparse
import json
import statistics

from pipeline_beside_torch import Links, run_ranks

WIDTH = 2048
BLOCK = 128
NONE = ("none", "always", 16, "none")
EPILOGUE = ("lowrank", "epilogue", 16, "none")
LOW_RANK = ("lowrank", "always", 16, "none")
# (stages, share, micro batches, compression, milliseconds of forward by stage; backward takes twice as long)
POINTS = [
    *((2, share, 8, NONE, (40, 40)) for share in (0.25, 0.5, 1, 2)),
    *((2, 2, 8, form, (40, 40)) for form in (LOW_RANK, ("lowrank", "always", 16, "int8"), ("int8", "always", 16, "int8"),
                                             ("int4", "always", 16, "int8"))),
    *((3, share, 8, NONE, (40, 40, 40)) for share in (0.25, 0.5, 1)),
    *((4, share, 8, NONE, (40, 40, 40, 40)) for share in (0.25, 0.5)),
    *((stages, 0.5, 8, form, (80,) * stages) for stages in (2, 3) for form in (NONE, EPILOGUE)),
    (2, 0.5, 8, NONE, (40, 60)),
    (2, 0.5, 8, NONE, (60, 40)),
    (3, 0.25, 8, NONE, (40, 60, 40)),
    (3, 0.25, 8, NONE, (60, 40, 20)),
    (2, 1, 20, NONE, (40, 40)),
    (3, 0.5, 20, NONE, (40, 40, 40)),
]


def bytes_of(form, rank, rows):
    if form == "none":
        return 2 * rows * WIDTH
    if form == "lowrank":
        return 2 * rank * (rows + WIDTH)
    return rows * WIDTH // BLOCK * (4 + BLOCK * (8 if form == "int8" else 4) // 8)


def measure(args, links, rate, point):
    stages, share, count, (form, when, rank, forward), forward_ms = POINTS[point]
    backward_ms = [2 * each for each in forward_ms]
    rows = max(1, round(share * (forward_ms[0] + backward_ms[0]) / 1e3 * rate / (2 * WIDTH)))
    listed = lambda each: ",".join(map(str, each))
    said = run_ranks(links, [args.worker, "60000", str(1 + args.repeats), "pipeline", listed(forward_ms), listed(backward_ms),
                             str(rows), str(WIDTH), str(count), form, when, str(rank), forward])
    seconds = [float(line) for line in said.split()[:-1]]
    make_s = seconds.pop(0) if form != "none" else 0
    last = []
    if form != "none":
        last = [0, *(count if when == "always" else stages - stage for stage in range(1, stages))]
    return {"point": [stages, share, count, form, when, forward, listed(forward_ms)],
            "forward_s": [each / 1e3 for each in forward_ms], "backward_s": [each / 1e3 for each in backward_ms],
            "micro_batches": count, "link_bytes_per_s": round(rate), "message_bytes": 2 * rows * WIDTH,
            "forward_bytes": 0 if forward == "none" else bytes_of(forward, rank, rows),
            "gradient_bytes": bytes_of(form, rank, rows), "make_s": make_s, "short_last": last,
            "step_s": statistics.median(seconds[1:]), "steps_s": seconds[1:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", required=True, help="rank_worker of the build")
    parser.add_argument("--points", default=f"0-{len(POINTS) - 1}", help="their numbers, first-last")
    parser.add_argument("--rate", type=float, default=2e8, help="bits per second of each link and direction")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    first, last = map(int, args.points.split("-"))
    for point in range(first, last + 1):
        with Links(POINTS[point][0], args.rate) as links:
            print(json.dumps(measure(args, links, links.measured_rate(), point)), flush=True)


if __name__ == "__main__":
    main()
