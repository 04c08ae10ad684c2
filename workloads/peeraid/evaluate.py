"""Networks that peeraid.py has saved, against AutoAttack as torchattacks has it (pip install torchattacks scipy).

    python evaluate.py --data /usr/share/datasets/fashion-mnist OUT/pgd-at-0/student.pt OUT/peeraid-0/student.pt
"""

import argparse
import json
import pathlib

import torch
import torchattacks
from peeraid import attacked, load, network, right

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("networks", type=pathlib.Path, nargs="+")
parser.add_argument("--data", type=pathlib.Path, required=True)
parser.add_argument("--images", type=int, default=1000, help="of the test set, from the first on")
parser.add_argument("--epsilon", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
x, y = load(options.data, "t10k")
x, y = x[: options.images], y[: options.images]
for path in options.networks:
    model = network(path)
    autoattack = torchattacks.AutoAttack(model, norm="Linf", eps=options.epsilon, n_classes=10, seed=options.seed)
    changed = torch.cat([autoattack(*batch) for batch in zip(x.split(250), y.split(250), strict=True)])
    row = {"clean": right(model, x, y), "pgd20": right(model, attacked(model, x, y, options), y)}
    row["autoattack"] = right(model, changed, y)
    print(json.dumps({"network": str(path)} | {key: round(100 * value, 2) for key, value in row.items()}), flush=True)
