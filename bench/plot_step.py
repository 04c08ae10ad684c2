"""Draws the times of optimizer steps as horizontal bars, each beside the limit of its drive.

Usage: plot_step.py RESULT.json ... --out step.svg

Each RESULT.json is what `smartinf bench step --json` printed. A bar is labelled with its file's name,
or with LABEL where the argument is LABEL=RESULT.json. The light bar is the time the drive needs for
the same bytes without computing, measured in the same run.
"""
import argparse
import html
import json
import pathlib
import sys

WIDTH, LABEL, VALUE, ROW, TOP = 720, 190, 150, 46, 34
UPDATE, LIMIT, INK = "#2f6db3", "#b9cfe8", "#24292f"


def read_result(argument):
    label, _, path = argument.rpartition("=")
    path = pathlib.Path(path)
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: not a result of `smartinf bench step --json`: {error}")
    if not isinstance(result, dict) or not isinstance(result.get("update_s"), (int, float)):
        sys.exit(f"{path}: has no update_s; is it a result of `smartinf bench step --json`?")
    return label or path.stem, result


def text(x, y, words, anchor="start", weight="normal"):
    return (f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}" '
            f'fill="{INK}">{html.escape(words)}</text>')


def draw(results):
    longest = max(max(r["update_s"], r.get("drive_limit_s") or 0) for _, r in results)
    scale = (WIDTH - LABEL - VALUE) / longest
    height = TOP + ROW * len(results) + 34
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
           'font-family="sans-serif" font-size="13">',
           f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
           text(8, 20, "Seconds of one optimizer step, median", weight="bold")]
    for row, (label, result) in enumerate(results):
        y = TOP + ROW * row
        update, limit = result["update_s"], result.get("drive_limit_s")
        out.append(text(LABEL - 8, y + 19, label, anchor="end"))
        out.append(f'<rect x="{LABEL}" y="{y + 4}" width="{update * scale:.1f}" height="20" fill="{UPDATE}"/>')
        words = f"{update:.3g} s"
        if limit:
            out.append(f'<rect x="{LABEL}" y="{y + 26}" width="{limit * scale:.1f}" height="8" fill="{LIMIT}"/>')
            words += f", {limit / update:.0%} of the drive's speed"
        # Beside the bar where there is room, else in it.
        end = LABEL + update * scale
        inside = end + 8 * len(words) > WIDTH
        out.append(text(end - 6, y + 19, words, anchor="end").replace(INK, "white") if inside
                   else text(end + 6, y + 19, words))
        low, high = result.get("update_s_min"), result.get("update_s_max")
        if low and high:
            out.append(f'<line x1="{LABEL + low * scale:.1f}" x2="{LABEL + high * scale:.1f}" '
                       f'y1="{y + 24}" y2="{y + 24}" stroke="{INK}" stroke-width="2"/>')
    y = TOP + ROW * len(results) + 18
    out.append(f'<rect x="{LABEL}" y="{y - 9}" width="14" height="10" fill="{UPDATE}"/>')
    out.append(text(LABEL + 20, y, "update"))
    out.append(f'<rect x="{LABEL + 80}" y="{y - 9}" width="14" height="10" fill="{LIMIT}"/>')
    out.append(text(LABEL + 100, y, "the drive alone; line: fastest to slowest step"))
    out.append("</svg>\n")
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", metavar="RESULT.json")
    parser.add_argument("--out", required=True, metavar="FILE.svg")
    arguments = parser.parse_args()
    svg = draw([read_result(argument) for argument in arguments.results])
    pathlib.Path(arguments.out).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
