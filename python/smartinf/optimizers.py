"""torch optimizers whose state lives on devices: see StorageOptimizer for what they share."""

from typing import Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from smartinf.storage_optimizer import StorageOptimizer
from smartinf.storage_options import StorageOptions

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "StorageOptimizer"]


class AdamW(StorageOptimizer):
    """AdamW with decoupled weight decay; numbers as in torch.optim.AdamW.

    lr, betas, eps, weight_decay, maximize: as in torch.optim.AdamW. amsgrad: must be False.
    devices and every further keyword: see StorageOptimizer.
    Source: Loshchilov and Hutter 2019, Algorithm 2.
    """

    _rule = "adamw"
    _state_keys = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, **storage: Unpack[StorageOptions],
    ) -> None:  # fmt: skip
        self._make(locals())


class Adam(StorageOptimizer):
    """Adam with L2 regularization; numbers as in torch.optim.Adam.

    lr, betas, eps, weight_decay, maximize: as in torch.optim.Adam. amsgrad: must be False.
    devices and every further keyword: see StorageOptimizer.
    Source: Kingma and Ba 2015, Algorithm 1.
    """

    _rule = "adam"
    _state_keys = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, amsgrad: bool = False, *, maximize: bool = False, **storage: Unpack[StorageOptions],
    ) -> None:  # fmt: skip
        self._make(locals())


class SGD(StorageOptimizer):
    """Stochastic gradient descent with momentum; numbers as in torch.optim.SGD.

    lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD. The momentum takes
        its place on the devices also when it is 0.
    devices and every further keyword: see StorageOptimizer.
    Source: Sutskever et al. 2013, with the momentum as torch defines it.
    """

    _rule = "sgd"
    _state_keys = ("momentum_buffer",)
    _torch_counts_steps = False

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, momentum: float = 0, dampening: float = 0,
        weight_decay: float = 0, nesterov: bool = False, *, maximize: bool = False, **storage: Unpack[StorageOptions],
    ) -> None:  # fmt: skip
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        self._make(locals())

    @staticmethod
    def _rule_options(group):
        momentum = float(group["momentum"])
        return {
            "beta1": momentum,
            # torch dampens what enters the momentum buffer, and has none without momentum.
            "dampening": float(group["dampening"]) if momentum != 0 else 0.0,
            "nesterov": bool(group["nesterov"]),
        }


class Adagrad(StorageOptimizer):
    """Adagrad; numbers as in torch.optim.Adagrad.

    lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in torch.optim.Adagrad.
    devices and every further keyword: see StorageOptimizer.
    Source: Duchi, Hazan and Singer 2011.
    """

    _rule = "adagrad"
    _state_keys = ("sum",)

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-2, lr_decay: float = 0, weight_decay: float = 0,
        initial_accumulator_value: float = 0, eps: float = 1e-10, *, maximize: bool = False,
        **storage: Unpack[StorageOptions],
    ) -> None:  # fmt: skip
        self._make(locals())


class Lion(StorageOptimizer):
    """Lion: the sign of an interpolated momentum; torch.optim has none.

    lr: of each step, in the unit of the weights: 3 to 10 times smaller than AdamW's.
    betas: of the step's direction, and of the momentum that is kept. weight_decay: decoupled; maximize.
    devices and every further keyword: see StorageOptimizer.
    Source: Chen et al. 2023, Algorithm 2.
    """

    _rule = "lion"
    _state_keys = ("exp_avg",)

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0, *, maximize: bool = False, **storage: Unpack[StorageOptions],
    ) -> None:  # fmt: skip
        self._make(locals())
