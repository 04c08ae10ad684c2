"""Every update rule and option against torch.optim over 1000 steps, the distance counted in ulps; rules of
tables' rows over 500.

Usage: kernels_parity_test.py PATH/TO/kernels_parity

torch's kernels fuse products with sums where the processor can; ours never do (docs/numerics.md). So
the two drift apart by roundings, and the bounds below are about twice what was measured. An ulp is
one of the largest number that took part: of the larger of an element's first and last weight, and of
its largest gradient (momentum), that squared (variance) or Adagrad's sum itself. The ulp of the last
value would measure how much of it had cancelled.

Adam with L2 decay is compared only where gradients are not small beside decay * weight: elsewhere a
weight falls towards zero, its sign becomes that of the step, and any rounding grows to a whole step.
"""

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

ELEMENTS = 4099
STEPS = 1000


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, Algorithm 2; torch.optim has none."""

    def __init__(self, params, lr, betas, weight_decay, maximize=False):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                grad = -p.grad if group["maximize"] else p.grad
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                direction = m * beta1 + grad * (1 - beta1)
                p.sub_(torch.sign(direction), alpha=group["lr"])
                m.mul_(beta2).add_(grad, alpha=1 - beta2)


def cases():
    """(rule, our options, torch optimizer, names of its state, ulps allowed)."""
    plain = dict(foreach=False, fused=False)
    for decay, maximize in itertools.product((0.0, 0.1), (False, True)):
        common = dict(lr=1e-3, weight_decay=decay, maximize=maximize)
        for betas in ((0.9, 0.999), (0.9, 0.95), (0.3, 0.9)):
            for eps in (1e-8, 1e-3):
                options = dict(common, beta1=betas[0], beta2=betas[1], eps=eps)
                for rule, kind in (("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)):
                    yield (rule, options, lambda p, c=common, b=betas, e=eps, k=kind: k(
                        [p], betas=b, eps=e, **c, **plain), ("exp_avg", "exp_avg_sq"))
        for momentum, dampening, nesterov in (
            (0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)):
            options = dict(common, beta1=momentum, dampening=dampening, nesterov=nesterov)
            yield ("sgd", options, lambda p, c=common, m=momentum, d=dampening, n=nesterov:
                torch.optim.SGD([p], momentum=m, dampening=d, nesterov=n, **c, **plain),
                ("momentum_buffer",) if momentum else ())
        for lr_decay, initial in ((0.0, 0.0), (0.01, 0.5)):
            options = dict(common, eps=1e-10, lr_decay=lr_decay, initial_accumulator_value=initial)
            yield ("adagrad", options, lambda p, c=common, d=lr_decay, i=initial: torch.optim.Adagrad(
                [p], lr_decay=d, initial_accumulator_value=i, eps=1e-10, **c, **plain), ("sum",))
        options = dict(common, beta1=0.9, beta2=0.99)
        yield ("lion", options, lambda p, c=common: Lion([p], betas=(0.9, 0.99), **c), ("exp_avg",))


# Largest distance allowed after 1000 steps: weights, and the worst of the other planes.
ULPS = {
    "adamw": (100, 3),
    "adam": (100, 4),
    "sgd": (50, 80),
    "adagrad": (20, 20),
    "lion": (1, 1),
}


def ulps(ours, theirs, scale):
    distance = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    return float(np.max(distance / np.spacing(scale.astype(np.float32))))


class RowWise(torch.optim.Optimizer):
    """FBGEMM's exact_row_wise_adagrad and partial_row_wise_adam, which torch.optim does not have."""

    def __init__(self, params, lr, rule, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, dict(lr=lr, rule=rule, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        (p,), (beta1, beta2), lr, eps = group["params"], group["betas"], group["lr"], group["eps"]
        state = self.state[p]
        state["step"] = t = state.get("step", 0) + 1
        m = state.setdefault("exp_avg", torch.zeros_like(p))
        v = state.setdefault("sum", torch.zeros(len(p)))
        gradient = p.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        square = values.square().mean(dim=1)
        if group["rule"] == "row_adagrad":
            v[rows] += square
            p[rows] -= lr / (v[rows].sqrt() + eps)[:, None] * values
        else:
            v[rows] = beta2 * v[rows] + (1 - beta2) * square
            m[rows] = beta1 * m[rows] + (1 - beta1) * values
            root = (v[rows] / (1 - beta2**t)).sqrt() + eps
            p[rows] -= lr * (m[rows] / (1 - beta1**t)) / root[:, None]


ROWS, DIM, BATCH, ROW_STEPS = 300, 37, 200, 500


def batch_order_sum(ids, values):
    """What coalesce() gives for few ids. Of more, torch adds duplicates in the order of a sort that is not
    stable."""
    rows, place = ids.unique(return_inverse=True)
    sums = torch.full((len(rows), DIM), -0.0).index_add_(0, place, values)
    return torch.sparse_coo_tensor(rows[None], sums, (ROWS, DIM), is_coalesced=True, check_invariants=True)


def exact_root_(values):
    """Correctly rounded, as IEEE 754 says; MKL's root, which torch has on x86, is off by an ulp at times."""
    return values.copy_(values.double().sqrt())


def rows_differ(binary, folder, generator):
    """Rules of rows, with duplicates in every batch: SparseAdam bit by bit, the others within ulps."""
    ids = np.minimum(generator.zipf(1.3, (ROW_STEPS, BATCH)) - 1, ROWS - 1).astype(np.uint32)
    gradients = generator.standard_normal((ROW_STEPS, BATCH, DIM)).astype(np.float32)
    gradients *= 10.0 ** generator.uniform(-6, 0, (ROW_STEPS, BATCH, 1)).astype(np.float32)
    initial = generator.standard_normal((ROWS, DIM)).astype(np.float32)
    for name, array in (("ids", ids), ("gradients", gradients), ("initial", initial)):
        array.tofile(folder / name)
    failed = False
    torch.Tensor.sqrt_ = exact_root_
    makers = {"sparse_adam": lambda p: torch.optim.SparseAdam([p], lr=1e-3, betas=(0.8, 0.99), eps=1e-6)}
    for rule in ("row_adagrad", "row_adam"):
        makers[rule] = lambda p, rule=rule: RowWise([p], 1e-3, rule, (0.8, 0.99), 1e-6)
    makers["sgd"] = lambda p: torch.optim.SGD([p], lr=1e-3)
    for rule, make_optimizer in makers.items():
        subprocess.run(
            [binary, rule, "lr=1e-3", "beta1=0.8", "beta2=0.99", "eps=1e-6", f"elements={ROWS * DIM}",
             f"dim={DIM}", f"batch={BATCH}", f"steps={ROW_STEPS}", f"ids={folder / 'ids'}",
             f"initial={folder / 'initial'}", f"gradients={folder / 'gradients'}",
             f"out={folder / 'out'}"], check=True)
        ours = np.fromfile(folder / "out", dtype=np.float32).reshape(ROWS, -1)
        p = torch.from_numpy(initial.copy()).requires_grad_()
        optimizer = make_optimizer(p)
        for of_ids, values in zip(ids, gradients):
            p.grad = batch_order_sum(torch.from_numpy(of_ids.astype(np.int64)), torch.from_numpy(values))
            optimizer.step()
        planes = [p.detach()]
        if rule == "sparse_adam":
            planes += [optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]
        theirs = torch.cat(planes, dim=1).numpy()
        distance = ulps(ours[:, :theirs.shape[1]], theirs, np.maximum(np.abs(theirs), 1e-3))
        print(f"rows, {rule}: within {distance:.1f} ulps")
        allowed = {"sparse_adam": 0, "sgd": 20, "row_adagrad": 10, "row_adam": 80}[rule]
        last = [int(np.max(np.nonzero((ids == row).any(axis=1))[0], initial=-1)) + 1 for row in range(ROWS)]
        if distance > allowed or ours[:, -1].view(np.uint32).tolist() != last:
            failed = True
            print(f"FAIL rows, {rule}: allowed {allowed}")
    return failed


def main():
    binary = sys.argv[1]
    generator = np.random.default_rng(0)
    # Magnitudes over six decades, some zeros.
    size = 10.0 ** generator.uniform(-6, 0, ELEMENTS)
    gradients = (generator.standard_normal((STEPS, ELEMENTS)) * size).astype(np.float32)
    gradients[:, ::97] = 0
    gradients[::3, ::89] = 0
    initial = generator.standard_normal(ELEMENTS).astype(np.float32)
    torch.set_num_threads(1)
    worst = {}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        gradients.tofile(folder / "gradients")
        initial.tofile(folder / "initial")
        for rule, options, make_optimizer, names in cases():
            arguments = [f"{name}={float(value)!r}" for name, value in options.items()]
            subprocess.run(
                [binary, rule, *arguments, f"elements={ELEMENTS}", f"steps={STEPS}",
                 f"initial={folder / 'initial'}", f"gradients={folder / 'gradients'}",
                 f"out={folder / 'out'}"], check=True)
            ours = np.fromfile(folder / "out", dtype=np.float32).reshape(-1, ELEMENTS)

            p = torch.from_numpy(initial.copy()).requires_grad_()
            optimizer = make_optimizer(p)
            for gradient in gradients:
                p.grad = torch.from_numpy(gradient.copy())
                optimizer.step()
            theirs = p.detach().numpy()
            decay = options["weight_decay"]
            seen = size > 1e-2 if rule == "adam" and decay else np.full(ELEMENTS, True)
            seen &= np.abs(gradients).max(axis=0) > 0
            weight_scale = np.maximum(np.abs(initial), np.abs(theirs))
            gradient_scale = np.abs(gradients).max(axis=0) + decay * weight_scale
            weights = ulps(ours[0][seen], theirs[seen], weight_scale[seen])
            state = 0.0
            for i, name in enumerate(names):
                plane = optimizer.state[p][name].numpy()
                scale = {"exp_avg_sq": gradient_scale**2, "sum": plane}.get(name, gradient_scale)
                state = max(state, ulps(ours[1 + i][seen], plane[seen], scale[seen]))
            allowed = ULPS[rule]
            if not (weights <= allowed[0] and state <= allowed[1]):
                failed = True
                print(f"FAIL {rule} {options}: weights {weights:.1f} ulps (allowed {allowed[0]}), "
                      f"state {state:.1f} (allowed {allowed[1]})")
            worst[rule] = tuple(max(pair) for pair in zip(worst.get(rule, (0, 0)), (weights, state)))
        failed |= rows_differ(binary, folder, generator)
    for rule, (weights, state) in worst.items():
        print(f"{rule}: weights within {weights:.1f} ulps, state within {state:.1f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
