#!/usr/bin/env python3
"""Draws docs/images/cluster_step.svg: a simulated step of two stages, as docs/cluster.md describes it.

    bench/cluster_step.py PATH/TO/smartinf
"""
import json
import pathlib
import subprocess
import sys
import tempfile

KINDS = {"F": ("#a1d99b", "forward of a micro batch"), "B": ("#9ecae1", "backward"), "H": ("#fee391", "head, both ways"),
         "u": ("#fdae6b", "update"), "g": ("#fdd0a2", "gradients"), "message": ("#bcbddc", "message")}
LEFT, WIDTH, ROW = 190, 900, 24
CLUSTER = "".join(f"[[box]]\nname = '{name}'\nmachine = 'workstation-gen4'\nranks = 1\n" for name in ("left", "right"))
CLUSTER += "[links]\nrate = '1 Gbit/s'\nlatency_s = 1e-4\nspread = 0.02\n"
FLAGS = ["--model", "gpt2-1.6B", "--seq", "1024", "--tokens-per-step", "32768", "--stages", "2", "--batch", "2"]


def spans_of(command, folder):
    cluster, trace = pathlib.Path(folder) / "cluster.toml", pathlib.Path(folder) / "step.json"
    cluster.write_text(CLUSTER, encoding="ascii")
    subprocess.run([command, "simulate", "--cluster", cluster, *FLAGS, "--trace", trace], check=True)
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    lanes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return [(lanes[event["pid"]], event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            for event in events if event["ph"] == "X"]


def drawn(spans, kinds):
    """spans: (lane, name, begin_s, end_s); kinds: color and words by a name's first letter, "message" of lanes of no stage."""
    lanes = sorted({lane for lane, *_ in spans}, key=lambda lane: (not lane.startswith("stage"), lane))
    end = max(span[3] for span in spans)
    x = lambda time: LEFT + WIDTH * time / end
    parts = ['<rect width="100%" height="100%" fill="#fff"/>']
    parts += [f'<text x="0" y="{i * ROW + 16}">{lane}</text>' for i, lane in enumerate(lanes)]
    for lane, name, begin_s, end_s in spans:
        y, wide = lanes.index(lane) * ROW + 2, x(end_s) - x(begin_s)
        color, _ = kinds[name[0] if lane.startswith("stage") else "message"]
        parts.append(f'<rect x="{x(begin_s):.1f}" y="{y}" width="{wide:.1f}" height="{ROW - 4}" fill="{color}" stroke="#fff" '
                     'stroke-width="0.5"/>')
        if wide > 7 * len(name) and len(name) > 1:
            parts.append(f'<text x="{x(begin_s) + 3:.1f}" y="{y + 14}">{name}</text>')
    high = len(lanes) * ROW
    parts += [f'<text x="{LEFT}" y="{high + 14}">0</text>',
              f'<text x="{LEFT + WIDTH}" y="{high + 14}" text-anchor="end">{end:.3g} s</text>']
    place = LEFT + 40
    for color, words in kinds.values():
        parts.append(f'<rect x="{place:.0f}" y="{high + 5}" width="11" height="11" fill="{color}"/>'
                     f'<text x="{place + 15:.0f}" y="{high + 14}">{words}</text>')
        place += 40 + 5.5 * len(words)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 5} {high + 20}" '
            f'font-family="sans-serif" font-size="11">{"".join(parts)}</svg>\n')


def main():
    with tempfile.TemporaryDirectory() as folder:
        spans = spans_of(sys.argv[1], folder)
    met = {name[0] if lane.startswith("stage") else "message" for lane, name, *_ in spans}
    picture = drawn(spans, {key: kind for key, kind in KINDS.items() if key in met})
    (pathlib.Path(__file__).resolve().parent.parent / "docs/images/cluster_step.svg").write_text(picture, encoding="ascii")


if __name__ == "__main__":
    main()
