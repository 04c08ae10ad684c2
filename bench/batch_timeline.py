#!/usr/bin/env python3
"""Draws how a batch job spent its time, from what `smartinf generate --batch ... --json` printed while it ran.

    smartinf generate MODEL --batch prompts.jsonl --out answers.jsonl --cache DIR --json > job.jsonl
    bench/batch_timeline.py job.jsonl --out docs/images/batch_timeline.svg

A column is the time between two lines. Rates are of that part of it in which tokens of answers were made.
"""

import argparse
import itertools
import json
import pathlib

LEFT, WIDTH, HIGH, GAP = 150, 760, 80, 44
SHARES = (
    ("prompts", "#fdae6b"),
    ("answers: the cores compute", "#74c476"),
    ("answers: they wait for the drive", "#c6dbef"),
)
INK, READ = "#24292f", "#3182bd"


def columns_of(lines):
    """(begin, end, differences) of each two lines, in seconds of the job."""
    zero = dict.fromkeys(lines[0], 0)
    made = []
    for before, after in itertools.pairwise([zero, *lines]):
        begin, end = (row["prompt_seconds"] + row["token_seconds"] for row in (before, after))
        if end > begin:
            made.append((begin, end, {key: after[key] - before[key] for key in after if key in before}, after))
    return made


class Picture:
    def __init__(self, seconds):
        self.scale, self.parts, self.y = WIDTH / seconds, [], 0

    def text(self, x, y, words, anchor="start", color=INK):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{words}</text>')

    def bar(self, begin, end, low, high, color):
        """low, high: of the panel, from 0 to 1."""
        x, wide = LEFT + begin * self.scale, (end - begin) * self.scale
        self.parts.append(f'<rect x="{x:.1f}" y="{self.y + HIGH * (1 - high):.1f}" width="{max(wide - 0.7, 0.5):.1f}" '
                          f'height="{HIGH * (high - low):.1f}" fill="{color}"/>')

    def panel(self, words, most, legend):
        """Begins the next one; most: what its upper edge is, or None."""
        self.y += GAP
        self.text(0, self.y + 12, words)
        x = LEFT
        for name, color in legend:
            self.parts.append(f'<rect x="{x}" y="{self.y - 15}" width="10" height="10" fill="{color}"/>')
            self.text(x + 14, self.y - 6, name)
            x += 34 + 6.6 * len(name)
        if most is not None:
            self.text(LEFT - 6, self.y + 10, f"{most:.3g}", "end")
            self.text(LEFT - 6, self.y + HIGH, "0", "end")

    def end_panel(self):
        self.y += HIGH
        self.parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{self.y}" y2="{self.y}" stroke="{INK}"/>')

    def bars(self, words, legend, columns, values):
        """values: of a column and of each name of the legend."""
        made = [[value(column) for value in values] for column in columns]
        most = max(1e-9, max(itertools.chain(*made)))
        self.panel(words, most, legend)
        for (begin, end, *_), row in zip(columns, made):
            for (_, color), value in sorted(zip(legend, row), key=lambda pair: -pair[1]):
                self.bar(begin, end, 0, value / most, color)
        self.end_panel()


def drawn(lines):
    columns = columns_of(lines)
    seconds = columns[-1][1]
    picture = Picture(seconds)
    picture.panel("time", None, SHARES)
    for begin, end, more, _ in columns:
        wait = more["cache_wait_seconds"]
        low = 0
        for (_, color), spent in zip(SHARES, (more["prompt_seconds"], more["token_seconds"] - wait, wait)):
            high = low + max(0, spent) / (end - begin)
            picture.bar(begin, end, low, min(1, high), color)
            low = high
    picture.end_panel()
    picture.bars("prompts at once", [("begun", "#9e9ac8")], columns, [lambda column: column[3]["active"]])
    per_s = lambda key: lambda column: column[2][key] / max(column[2]["token_seconds"], 1e-9)
    picture.bars("new tokens/s", [("while answers are made", "#74c476")], columns, [per_s("tokens")])
    picture.bars("drive, GB/s", [("read while answers are made", READ)], columns,
                 [lambda column: per_s("cache_read_bytes")(column) / 1e9])
    for mark in range(0, int(seconds) + 1, max(1, round(seconds / 6 / 10) * 10)):
        picture.text(LEFT + mark * picture.scale, picture.y + 15, f"{mark} s", "middle")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 15} {picture.y + 22}" '
            f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
            f'{"".join(picture.parts)}</svg>\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.job.read_text().splitlines() if line.startswith("{")]
    options.out.write_text(drawn(lines), encoding="ascii")


if __name__ == "__main__":
    main()
