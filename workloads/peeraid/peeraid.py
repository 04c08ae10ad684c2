"""Image classifiers that withstand small changes of their inputs: PeerAiD (CVPR 2024, arXiv 2403.06668), and beside it, in
the same loop, what it is compared with: natural training, PGD-AT, TRADES and RSLAD.

    python peeraid.py train peeraid --data /usr/share/datasets/fashion-mnist --device DIR --out OUT
    python peeraid.py compare --data ... --device DIR --out OUT --seeds 0 1 2        # all methods, one table

PeerAiD trains two networks on each other: inputs are changed so that the student leaves the peer's opinion, and both learn
from these. They are two groups of one storage optimizer, so that both are of the same step after a kill, too. Run a
command again and it goes on where it stopped. OUT gets METHOD-SEED/student.pt (and peer.pt): state dicts.

Written from the papers' formulas. Networks have GroupNorm where the papers have BatchNorm: they have no statistics beside
their weights, so that a step follows from the weights and its number alone. Weights are not averaged over steps.
"""

import argparse
import gzip
import json
import pathlib
import struct
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

import smartinf

METHODS = ("natural", "pgd-at", "trades", "rslad", "peeraid")


def read_idx(path):
    """The array of an idx file, gzipped or not: uint8. Errors: ValueError with the path for anything else."""
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as file:
        data = file.read()
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is no idx file of bytes: it begins with {data[:4].hex()}, and 000008 was expected")
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    values = torch.frombuffer(bytearray(data[4 + 4 * data[3] :]), dtype=torch.uint8)
    if values.numel() != torch.Size(shape).numel():
        raise ValueError(f"{path} has {values.numel()} values where its header says {tuple(shape)}: get the file again")
    return values.reshape(shape)


def load(folder, part):
    """part: "train" or "t10k". Returns images [n, 1, height, width] in [0, 1] and labels [n]."""
    found = []
    for what in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        names = [folder / f"{part}-{what}{end}" for end in (".gz", "")]
        path = next((name for name in names if name.exists()), None)
        if path is None:
            raise FileNotFoundError(f"{names[0]} is not there: Debian's package dataset-fashion-mnist has such files")
        found.append(read_idx(path))
    images, labels = found
    if len(images) != len(labels):
        raise ValueError(f"{folder}: {len(images)} images of {part}, and {len(labels)} labels")
    return images.unsqueeze(1).float() / 255, labels.long()


class Block(nn.Module):
    """He et al. 2016, figure 2, with GroupNorm."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(4, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(4, outputs),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        self.beside = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        return torch.relu(self.inner(x) + self.beside(x))


def small_resnet(width, seed, classes=10):
    """Squares of 4 x 4 pixels, two blocks, and the mean of what they find. width: channels of the first block; a multiple
    of 4."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 4, bias=False), Block(width, width, 1), Block(width, 2 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes),
    )  # fmt: skip


def kl(target, logits, temperature=1.0, mean_of_classes=False):
    """KL(target || logits) of the classes' probabilities, the mean of the batch. Both: logits [n, classes].

    mean_of_classes: divided by their number as well, as torch's reduction "mean" does."""
    target, logits = ((x / temperature).log_softmax(-1) for x in (target, logits))
    each = kl_div(logits, target, log_target=True, reduction="none")
    return each.mean() if mean_of_classes else each.sum() / len(each)


def attack(loss_of, x, start, bounds):
    """Inputs that make loss_of(inputs) large, at most epsilon from x in each pixel and in [0, 1]: projected gradient ascent
    (Madry et al. 2018). start: where it begins, x and noise. bounds: epsilon, and steps of 2.5 epsilon / steps each."""
    low, high = (x - bounds.epsilon).clamp(min=0), (x + bounds.epsilon).clamp(max=1)
    changed = torch.minimum(torch.maximum(start, low), high)
    for _ in range(bounds.attack_steps):
        changed.requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(changed), changed)
        changed = changed.detach() + 2.5 * bounds.epsilon / bounds.attack_steps * gradient.sign()
        changed = torch.minimum(torch.maximum(changed, low), high)
    return changed


def loss_of_step(method, student, other, x, y, noise, options):
    """The loss of a batch. other: the peer (peeraid) or a trained teacher (rslad). noise: a normal one [like x]."""
    near = x + 0.001 * noise
    if method == "natural":
        return cross_entropy(student(x), y)
    if method == "pgd-at":  # Madry et al. 2018, (2.1)
        uniform = torch.erf(noise / 2**0.5) * options.epsilon
        return cross_entropy(student(attack(lambda z: cross_entropy(student(z), y), x, x + uniform, options)), y)
    if method == "trades":  # Zhang et al. 2019, (5), 1/lambda = 6
        clean = student(x)
        changed = attack(lambda z: kl(clean.detach(), student(z)), x, near, options)
        return cross_entropy(clean, y) + 6 * kl(clean, student(changed))
    with torch.no_grad():
        opinion = other(x)
    changed = attack(lambda z: kl(opinion, student(z)), x, near, options)
    mine = student(changed)
    if method == "rslad":  # Zi et al. 2021, table 1
        return 5 / 6 * kl(opinion, mine) + 1 / 6 * kl(opinion, student(x))
    # PeerAiD, (3) and (4): means over batch and classes, targets not detached.
    t, (gamma1, gamma2), (lambda1, lambda2, lambda3) = options.temperature, options.gammas, options.lambdas
    theirs = other(changed)
    target = mine.detach() if options.detach_targets else mine
    clean = student(x).detach() if options.detach_targets else student(x)
    of_peer = gamma1 * cross_entropy(theirs, y) + gamma2 * t**2 * kl(target, theirs, t, True)
    of_student = lambda2 * kl(theirs.detach(), mine, t, True) + lambda3 * kl(clean, mine, t, True)
    return of_peer + lambda1 * cross_entropy(mine, y) + t**2 * of_student


def rate(step, steps, highest):
    """The papers': a tenth from 71, 86 and 95 % of the steps on; and a short beginning."""
    done = step / steps
    return highest * 0.1 ** sum(done >= part for part in (0.71, 0.86, 0.95)) * min(1, (step + 1) / (0.05 * steps))


def train(method, options, seed):
    """Trains a student, and goes on where an earlier call stopped. Returns the folder of its weights."""
    x, y = load(options.data, "train")
    x, y = x[: options.images], y[: options.images]
    name = f"{method}-{seed}"
    out = options.out / name
    student = small_resnet(options.width, 2 * seed)
    groups = [{"params": list(student.named_parameters(prefix="student"))}]
    other = None
    if method in ("rslad", "peeraid"):
        other = small_resnet(options.width, 2 * seed + 1)
    if method == "rslad":
        other.load_state_dict(torch.load(options.teacher or options.out / f"trades-{seed}" / "student.pt"))
    if method == "peeraid":
        groups.append({"params": list(other.named_parameters(prefix="peer"))})
    batches = len(x) // options.batch
    steps = options.epochs * batches
    with smartinf.SGD(
        groups, lr=options.lr, momentum=0.9, weight_decay=2e-4, devices=[options.device / name], resume=True,
        max_grad_norm=float("inf"), durability=options.durability,
    ) as optimizer:  # fmt: skip
        for step in range(optimizer.updates, steps):
            epoch, batch = divmod(step, batches)
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
            ids = order[batch * options.batch : (batch + 1) * options.batch]
            generator = torch.Generator().manual_seed(seed + 1000 * (step + 1))
            noise = torch.randn(x[ids].shape, generator=generator)
            loss = loss_of_step(method, student, other, x[ids], y[ids], noise, options)
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps, options.lr)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if batch == batches - 1:
                print(f"{name}: epoch {epoch + 1} of {options.epochs}, loss {loss.item():.4f}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    torch.save(student.state_dict(), out / "student.pt")
    if method == "peeraid":
        torch.save(other.state_dict(), out / "peer.pt")
    return out


def network(path):
    """One that was saved."""
    state = torch.load(path)
    model = small_resnet(len(state["0.weight"]), 0)
    model.load_state_dict(state)
    return model.eval()


def right(model, x, y):
    """The share of inputs that a model classifies rightly."""
    with torch.no_grad():
        return (model(x).argmax(-1) == y).float().mean().item()


def attacked(model, x, y, bounds):
    """The inputs after 20 steps against the label."""
    bounds = argparse.Namespace(epsilon=bounds.epsilon, attack_steps=20)
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    start = x + bounds.epsilon * noise
    return torch.cat([
        attack(lambda z, b=b: cross_entropy(model(z), b), a, s, bounds)
        for a, b, s in zip(x.split(250), y.split(250), start.split(250), strict=True)
    ])  # fmt: skip


def compare(options):
    """Trains all methods for each seed and prints a row for each: accuracies on the first test images, in percent.

    Rows are added to rows.jsonl in the output folder; those that it has are not made again."""
    x, y = load(options.data, "t10k")
    x, y = x[: options.test_images], y[: options.test_images]
    kept = options.out / "rows.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    rows = {(row["method"], row["seed"]): row for row in rows}
    for seed in options.seeds:
        for method in METHODS:
            if (method, seed) in rows:
                print(json.dumps(rows[method, seed]), flush=True)
                continue
            out = train(method, options, seed)
            student = network(out / "student.pt")
            changed = attacked(student, x, y, options)
            row = {"method": method, "seed": seed, "clean": right(student, x, y), "pgd20": right(student, changed, y)}
            if method == "peeraid":
                peer, teacher = network(out / "peer.pt"), network(options.out / f"trades-{seed}" / "student.pt")
                row |= {
                    "peer_clean": right(peer, x, y),
                    "peer_on_own_attacks": right(peer, attacked(peer, x, y, options), y),
                    "peer_on_students_attacks": right(peer, changed, y),
                    "teacher_on_students_attacks": right(teacher, changed, y),
                }
            line = json.dumps({key: round(100 * v, 2) if isinstance(v, float) else v for key, v in row.items()})
            print(line, flush=True)
            with kept.open("a") as file:
                file.write(line + "\n")


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    command = parser.add_subparsers(dest="command", required=True)
    one, every = command.add_parser("train"), command.add_parser("compare")
    one.add_argument("method", choices=METHODS)
    one.add_argument("--seed", type=int, default=0)
    every.add_argument("--seeds", type=int, nargs="+", default=[0])
    every.add_argument("--test-images", type=int, default=1000)
    for each in (one, every):
        each.add_argument("--data", type=pathlib.Path, required=True, help="a folder with train- and t10k- idx files")
        each.add_argument("--device", type=pathlib.Path, required=True, help="a folder on a drive, for the optimizer")
        each.add_argument("--out", type=pathlib.Path, required=True)
        each.add_argument("--teacher", type=pathlib.Path, help="rslad's; default: OUT/trades-SEED/student.pt")
        each.add_argument("--images", type=int, default=60000, help="of the training set, from the first on")
        each.add_argument("--epochs", type=int, default=30)
        each.add_argument("--batch", type=int, default=128)
        each.add_argument("--width", type=int, default=16)
        each.add_argument("--lr", type=float, default=0.05)
        each.add_argument("--epsilon", type=float, default=0.1)
        each.add_argument("--attack-steps", type=int, default=10)
        each.add_argument("--temperature", type=float, default=5.0, help="peeraid's; its defaults are the paper's for CIFAR-10")
        each.add_argument("--gammas", type=float, nargs=2, default=[1, 0.1], help="of the peer: labels, student")
        each.add_argument("--lambdas", type=float, nargs=3, default=[0, 1, 1], help="of the student: labels, peer, itself")
        each.add_argument("--detach-targets", action="store_true", help="gradients do not go through losses' targets")
        each.add_argument("--durability", choices=["step", "none"], default="step")
    options = parser.parse_args(arguments)
    try:
        if options.command == "compare":
            compare(options)
        else:
            train(options.method, options, options.seed)
    except (OSError, ValueError) as error:
        sys.exit(f"peeraid: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
