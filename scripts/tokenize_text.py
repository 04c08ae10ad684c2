#!/usr/bin/env python3
"""Turns text into token files that smartinf trains on (llm.c's .bin form).

Examples:
  scripts/tokenize_text.py --tokenizer tokenizer.json --out data/ books/*.txt
  smartinf train RECIPE --data.paths data/tokens_000.bin --data.tokenizer tokenizer.json \\
      --model.vocabulary 32000

A folder stands for all files in it, in the order of their names; each file is one document, ended by
the --separator token where there is one. The last line says the vocabulary that model.vocabulary needs.
"""
import argparse
import pathlib
import sys

HEADER_INTS = 256
# Magic and version of files with 16-bit and with 32-bit tokens.
NARROW = (20240520, 1, "<u2")
WIDE = (20240801, 7, "<u4")


def text_files(paths):
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.is_file())
        elif path.is_file():
            yield path
        else:
            sys.exit(f"{path}: no such file or folder")


def write_tokens(path, tokens, wide):
    import numpy
    magic, version, kind = WIDE if wide else NARROW
    header = numpy.zeros(HEADER_INTS, "<i4")
    header[:3] = magic, version, len(tokens)
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as out:
        out.write(header.tobytes())
        out.write(numpy.asarray(tokens, kind).tobytes())
    partial.rename(path)
    print(f"{path}: {len(tokens)} tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", help="text files, or folders of them")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json of Hugging Face's tokenizers")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder for the token files")
    parser.add_argument("--separator", help="token after each file, e.g. '<|endoftext|>'")
    parser.add_argument("--tokens-per-file", type=int, default=100_000_000,
                        help="largest token file (default: %(default)s)")
    arguments = parser.parse_args()
    if not 0 < arguments.tokens_per_file < 2**31:
        parser.error("--tokens-per-file must be from 1 to 2147483647, what a header can hold")
    try:
        import numpy  # noqa: F401
        import tokenizers
    except ImportError as missing:
        sys.exit(f"{missing}; scripts/setup.sh installs it")
    if not pathlib.Path(arguments.tokenizer).is_file():
        sys.exit(f"--tokenizer: no file {arguments.tokenizer}")
    tokenizer = tokenizers.Tokenizer.from_file(arguments.tokenizer)
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    ends = []
    if arguments.separator is not None:
        token = tokenizer.token_to_id(arguments.separator)
        if token is None:
            sys.exit(f"--separator: the tokenizer has no token {arguments.separator!r}")
        ends = [token]

    arguments.out.mkdir(parents=True, exist_ok=True)
    tokens, files = [], 0
    for path in text_files(arguments.text):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            print(f"{path}: left out, no UTF-8 text", file=sys.stderr)
            continue
        tokens += tokenizer.encode(text, add_special_tokens=False).ids + ends
        while len(tokens) >= arguments.tokens_per_file:
            write_tokens(arguments.out / f"tokens_{files:03}.bin", tokens[:arguments.tokens_per_file],
                         vocabulary > 2**16)
            del tokens[:arguments.tokens_per_file]
            files += 1
    if tokens:
        write_tokens(arguments.out / f"tokens_{files:03}.bin", tokens, vocabulary > 2**16)
        files += 1
    if files == 0:
        sys.exit("no text found")
    print(f"model.vocabulary = {vocabulary}")


if __name__ == "__main__":
    main()
