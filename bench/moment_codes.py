"""How far updates of AdamW are from exact ones where its moments are kept in codes of a few bits.

`keep` fine-tunes a model of a Hugging Face folder with torch's AdamW, in f32, and keeps the gradients
of some of its parameters. `compare` replays them, once with exact moments and once with moments that
are encoded and decoded after every step, and prints how far the updates are apart: the norm of the
difference over that of the exact update, the same of all updates summed up, and the largest update in
units of the learning rate, which exact moments keep near 1. `regress` trains a logistic regression
whose features differ in scale by e^1.5, and prints how far its loss ends from that of exact moments.

  bench/moment_codes.py keep models/smollm2 --chats chats.jsonl --out gradients.pt --steps 60
  bench/moment_codes.py compare gradients.pt --momentum "float 8 0 1" "log 0.5" --root "float 8 1 0.5"
  bench/moment_codes.py regress --momentum "float 8 0 1" --root "float 8 1 0.5" --tile 64 128 256

Codes are given by their values from 0 to the largest, relative to the largest of a tile; a momentum
has a sign as well, a root has no code for 0, and what rounds to a code is one of its two neighbours,
right on average:
  exact         no code
  float O M B   numbers of O octaves and M bits of mantissa from 1 on, less B: the q8 code is float 8 4 1
                for momenta and float 8 5 1 for roots of variances
  log R         1, R, R^2, ... ; a momentum has 0 as well
  squares, soft squares of even steps; even steps of y in y / (2 - y)
"""
import argparse
import itertools
import json
import math

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
SETTLED = 8  # steps before this one are not counted


def levels(text, bits, zero):
    """Ascending values of a code, the last of which is 1; `zero`: whether one of them is 0."""
    name, *numbers = text.split()
    count = 1 << bits
    if name == "float":
        octaves, mantissa, bias = int(numbers[0]), int(numbers[1]), float(numbers[2])
        values = [2**o * (1 + f / 2**mantissa) - bias for o in range(octaves) for f in range(2**mantissa)]
        return [value / values[-1] for value in values]
    if name == "log":
        ratio = float(numbers[0])
        steps = [ratio**k for k in range(count - zero - 1, -1, -1)]
        return [0.0, *steps] if zero else steps
    even = [k / (count - 1) for k in range(count)] if zero else [(k + 1) / count for k in range(count)]
    if name == "squares":
        return [y * y for y in even]
    if name == "soft":
        return [y / (2 - y) for y in even]
    raise SystemExit(f"no code {text}")


def rounded(torch, values, code, tile, generator):
    """values: [n], signs and all. Each tile's largest magnitude has the largest code."""
    count = values.numel()
    tiles = torch.nn.functional.pad(values, (0, -count % tile)).view(-1, tile)
    largest = tiles.abs().amax(1, keepdim=True).clamp_min(1e-30)
    share = tiles.abs() / largest
    share = share.clamp_min(code[0])
    above = torch.bucketize(share, code).clamp(1, len(code) - 1)
    low, high = code[above - 1], code[above]
    up = torch.rand(share.shape, generator=generator) < (share - low) / (high - low)
    return (torch.where(up, high, low) * largest * tiles.sign()).view(-1)[:count]


def replay(torch, gradients, momentum_code, root_code, tile):
    """gradients: [steps, n]. Returns the error of an update, that of their sum, the largest update."""
    count = gradients.shape[1]
    generator = torch.Generator().manual_seed(5)
    exact = coded = (torch.zeros(count), torch.zeros(count))
    error = square = largest = 0.0
    errors, updates = torch.zeros(count), torch.zeros(count)

    def step(state, gradient):
        momentum, variance = state
        return torch.lerp(momentum, gradient, 1 - BETA1), variance * BETA2 + (1 - BETA2) * gradient * gradient

    for t, gradient in enumerate(gradients.float(), 1):
        exact, coded = step(exact, gradient), step(coded, gradient)
        corrections = 1 - BETA1**t, math.sqrt(1 - BETA2**t)
        update, other = (m / corrections[0] / (v.sqrt() / corrections[1] + EPS) for m, v in (exact, coded))
        if t > SETTLED:
            difference = other - update
            error += float(difference.square().sum())
            square += float(update.square().sum())
            largest = max(largest, float(other.abs().max()))
            errors += difference
            updates += update
        momentum, root = coded[0], coded[1].sqrt()
        if momentum_code is not None:
            momentum = rounded(torch, momentum, momentum_code, tile, generator)
        if root_code is not None:
            root = rounded(torch, root, root_code, tile, generator)
        coded = momentum, root * root
    return math.sqrt(error / square), float(errors.norm() / updates.norm()), largest


def each_pair(torch, args):
    """Every pair of codes and every tile: the text of a row, and codes to call replay() or regress() with."""
    def code(text, bits, zero):
        if text == "exact":
            return None
        return torch.tensor([value for value in levels(text, bits, zero) if zero or value > 0])

    for momentum, root, tile in itertools.product(args.momentum, args.root, args.tile):
        codes = code(momentum, args.momentum_bits - 1, True), code(root, args.root_bits, False)
        yield f"{momentum:16} {root:16} {tile:5}", (*codes, tile)


def compare(args):
    import torch

    torch.set_num_threads(args.threads)
    kept = torch.load(args.gradients)
    print(f"{'momentum':16} {'root':16} {'tile':>5} {'update':>8} {'summed':>8} {'largest':>8}")
    for row, codes in each_pair(torch, args):
        results = [replay(torch, one[:, : args.elements], *codes) for one in kept.values()]
        update, summed, largest = zip(*results, strict=True)
        means = f"{sum(update) / len(results):8.3f} {sum(summed) / len(results):8.3f}"
        print(f"{row} {means} {max(largest):8.2f}", flush=True)


def loss_of_regression(torch, momentum_code, root_code, tile, seed, features=512, batch=32, steps=600):
    """Mean loss of the last 200 steps of AdamW."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(features, generator=generator)
    scale = torch.exp(1.5 * torch.randn(features, generator=generator))
    weights, momentum, root = torch.zeros(features), torch.zeros(features), torch.zeros(features)
    tail = 0.0
    for t in range(1, steps + 1):
        rows = scale * torch.randn(batch, features, generator=generator) * 0.05
        noise = torch.randn(batch, generator=generator)
        label = torch.where((truth * rows / scale * 4).sum(1) + noise > 0, 1.0, -1.0)
        found = rows @ weights
        if t > steps - 200:
            tail += float(torch.nn.functional.softplus(-label * found).mean()) / 200
        gradient = (-label / (1 + torch.exp(label * found)) / batch) @ rows
        lr = 0.05 * (1 - 0.9 * t / steps)
        momentum = momentum * BETA1 + (1 - BETA1) * gradient
        variance = root * root * BETA2 + (1 - BETA2) * gradient * gradient
        weights = weights * (1 - lr * 0.01)
        weights -= lr * momentum / (1 - BETA1**t) / ((variance / (1 - BETA2**t)).sqrt() + EPS)
        root = variance.sqrt()
        if momentum_code is not None:
            momentum = rounded(torch, momentum, momentum_code, tile, generator)
        if root_code is not None:
            root = rounded(torch, root, root_code, tile, generator)
    return tail


def regress(args):
    import torch

    torch.set_num_threads(args.threads)

    def mean(*codes):
        return sum(loss_of_regression(torch, *codes, seed) for seed in args.seeds) / len(args.seeds)

    exact = mean(None, None, 1)
    print(f"{'momentum':16} {'root':16} {'tile':>5} {'loss':>8}, exact moments: {exact:.4f}")
    for row, codes in each_pair(torch, args):
        loss = mean(*codes)
        print(f"{row} {loss:8.4f} {(loss / exact - 1) * 100:+.1f} %", flush=True)


def keep(args):
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    with open(args.chats, encoding="utf-8") as lines:
        chats = [json.loads(line)["messages"] for line in lines]
    order = torch.randperm(len(chats), generator=torch.Generator().manual_seed(args.seed)).tolist()
    # Of every eighth matrix, and of the embedding, whose rows a step touches or does not.
    names = [name for name, p in model.named_parameters() if p.dim() > 1]
    chosen = [names[0], *names[1::8]]
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
    kept = {name: [] for name in chosen}
    for step in range(args.steps):
        text = tokenizer.apply_chat_template(chats[order[step % len(order)]], tokenize=False)
        tokens = torch.tensor(tokenizer(text)["input_ids"][: args.sequence])[None]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for name in chosen:
            kept[name].append(parameters[name].grad.flatten()[: args.elements].bfloat16())
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}, loss {float(loss):.4f}", flush=True)
    torch.save({name: torch.stack(steps) for name, steps in kept.items()}, args.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("keep")
    one.add_argument("model")
    one.add_argument("--chats", required=True)
    one.add_argument("--out", required=True)
    one.add_argument("--steps", type=int, default=60)
    one.add_argument("--sequence", type=int, default=256)
    one.add_argument("--lr", type=float, default=1e-4)
    one.add_argument("--seed", type=int, default=3)
    one.set_defaults(run=keep)
    other = commands.add_parser("compare")
    other.add_argument("gradients")
    other.set_defaults(run=compare)
    third = commands.add_parser("regress")
    third.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    third.set_defaults(run=regress)
    for command in (other, third):
        command.add_argument("--momentum", nargs="+", default=["exact"])
        command.add_argument("--root", nargs="+", default=["exact"])
        command.add_argument("--momentum-bits", type=int, default=4)
        command.add_argument("--root-bits", type=int, default=4)
        command.add_argument("--tile", type=int, nargs="+", default=[256])
    for command in (one, other):
        command.add_argument("--elements", type=int, default=32768, help="of each parameter")
    for command in (one, other, third):
        command.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
