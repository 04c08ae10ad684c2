"""Counts processes whose first gradients in torch are not those of the others: docs/numerics.md.

Each child is forked before torch has computed anything, builds the same model, and makes the same
two backward passes. No smartinf in it.

  bench/torch_first_gradients.py --children 4000 --threads 2
  bench/torch_first_gradients.py --children 4000 --threads 1
"""
import argparse
import collections
import hashlib
import os

import torch


def first_gradients(threads):
    torch.set_num_threads(threads)
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(20, 301), torch.nn.Tanh(), torch.nn.Linear(301, 20))
    for _ in range(2):
        model(torch.randn(8, 20)).pow(2).mean().backward()
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.grad.numpy().tobytes())
    return digest.hexdigest()


def of_a_child(threads):
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(into, first_gradients(threads).encode())
        os._exit(0)
    os.close(into)
    found = os.read(out, 64).decode()
    os.close(out)
    _, status = os.waitpid(child, 0)
    if status != 0 or len(found) != 64:
        raise SystemExit(f"a child ended with status {status}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--children", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    counts = collections.Counter(of_a_child(options.threads) for _ in range(options.children))
    others = options.children - counts.most_common(1)[0][1]
    print(f"torch {torch.__version__}, {options.threads} threads: {others} of {options.children} differ")


if __name__ == "__main__":
    main()
