"""A smaller language model learns from a larger one, block by block: channels of each layer are taken out, and what is left
learns to return what the whole layer did.

    python examples/distill.py MODEL TEXT UNSEEN DEVICE OUT

MODEL: a folder of transformers. TEXT: a file to learn from; UNSEEN: one by which both are judged. DEVICE: a folder on a drive.
OUT gets the student. Run it again after a kill: it goes on where it stopped.
"""

import argparse
import logging
import pathlib
import resource

import torch
import transformers

import smartinf

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
for name in ("model", "text", "unseen", "device", "out"):
    parser.add_argument(name)
parser.add_argument("--ffn", type=float, default=0.75, help="part of the feed-forward channels that stays")
parser.add_argument("--heads", type=float, default=1.0)
parser.add_argument("--tokens", type=int, default=200_000)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--rows", type=int, default=2, help="of a batch, each of so many tokens")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--whole-epochs", type=int, default=0)
parser.add_argument("--lr", type=float, default=2e-4)
parser.add_argument("--inputs", choices=["teacher", "student"], default="student")
parser.add_argument("--stream", help="a folder: the teacher's weights are there, and a block at a time in memory")
args = parser.parse_args()
logging.basicConfig(level=logging.INFO, format="%(message)s")
tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)


def batches(path, count):
    text = pathlib.Path(path).read_text(encoding="utf-8")[: 8 * count * args.rows * args.length]
    ids = torch.tensor(tokenizer(text)["input_ids"])
    return list(ids[: len(ids) // (args.rows * args.length) * args.rows * args.length].view(-1, args.rows, args.length)[:count])


data = batches(args.text, args.tokens // (args.rows * args.length))
if args.stream:
    teacher = smartinf.from_pretrained(args.model, devices=[args.stream], dtype=torch.float32, keep=0)
else:
    teacher = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
student = smartinf.prune(teacher, data[:8], ffn=args.ffn, heads=args.heads)
made = smartinf.distill(
    teacher, student, data, devices=[args.device], out=args.out, lr=args.lr, epochs=args.epochs,
    whole_epochs=args.whole_epochs, inputs=args.inputs, evaluation=batches(args.unseen, 8),
)  # fmt: skip
of = made.perplexity
closed = (of["untrained"] - of["distilled"]) / (of["untrained"] - of["teacher"])
print(
    f"perplexity of unseen text: teacher {of['teacher']:.3f}, untrained student {of['untrained']:.3f}, distilled "
    f"{of['distilled']:.3f}: {100 * closed:.1f} % of the gap closed with {len(data) * args.rows * args.length} tokens"
)
print(f"largest memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
