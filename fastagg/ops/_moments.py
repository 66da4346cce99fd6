# SPDX-License-Identifier: Apache-2.0
"""Steps of server optimizers on the flat vector: one pass over parameters, moments, aggregate."""

from __future__ import annotations

from torch import Tensor

from fastagg.ops._dispatch import compiled, mark_changed, op

__all__ = ["add_adaptive_", "add_momentum_"]

# A step is the result of up to eight roundings to float32, of 6e-8 each: coefficients, moments,
# square, root, quotient. Errors of the parameters are relative to it.
_STEP_ROUNDED = 5e-7


@op(
    example=lambda f, x: (
        f(x.params, x.memory[1].clone(), x.updates[0], 0.7, 0.9),
        f(x.params, x.memory[1].clone(), x.updates[0], 0.7, 0.9, True),
        f(x.params, x.memory[1].clone(), x.total, 0.7, 0.9, True, 1 / len(x.memory), True),
    ),
    bound=_STEP_ROUNDED,
)
def add_momentum_(
    params: Tensor,
    m: Tensor,
    aggregate: Tensor,
    lr: float,
    beta_1: float,
    nesterov: bool = False,
    norm: float = 1.0,
    models: bool = False,
) -> Tensor:
    """Move the parameters along an aggregate with momentum, in one pass, in place.

    ::

        v = norm * aggregate  # with models: norm * aggregate - params
        m = beta_1 * m + v
        params += lr * m  # with nesterov: lr * (v + beta_1 * m)

    Args:
        params: float32 [d]; changed in place.
        m: float32 [d], the momentum; changed in place.
        aggregate: float32 or float64 [d].
        lr: server learning rate.
        beta_1: in [0, 1).
        nesterov: take the step of Nesterov's momentum, as ``torch.optim.SGD`` does.
        norm: factor that makes ``aggregate`` a mean.
        models: ``aggregate`` is a sum of models, not of updates.

    Returns:
        ``params``. ``lr``, ``beta_1`` and v are rounded to float32, and each sum with a product is
        rounded once. Magnitudes of m below 2^-126 become 0. For the same v, bits do not depend on
        the instruction set.
    """
    compiled.add_momentum_(params, m, aggregate, lr, beta_1, nesterov, norm, models)
    mark_changed(params, m)
    return params


@op(
    example=lambda f, x: (
        f(x.params, x.memory[1].clone(), x.memory[0].abs(), x.updates[0], "adagrad", 0.1, 0.0, 0.0,
          1e-3),
        f(x.params, x.memory[1].clone(), x.memory[0].abs(), x.updates[0], "adam", 0.1, 0.9, 0.99,
          1e-3),
        f(x.params, x.memory[1].clone(), x.memory[0].abs(), x.total, "yogi", 0.1, 0.9, 0.99, 1e-3,
          1 / len(x.memory), True),
    ),
    bound=_STEP_ROUNDED,
)  # fmt: skip
def add_adaptive_(
    params: Tensor,
    m: Tensor,
    s: Tensor,
    aggregate: Tensor,
    kind: str,
    lr: float,
    beta_1: float,
    beta_2: float,
    tau: float,
    norm: float = 1.0,
    models: bool = False,
) -> Tensor:
    """Move the parameters by an adaptive server optimizer, in one pass, in place.

    ::

        v = norm * aggregate          # with models: norm * aggregate - params
        m = beta_1 * m + (1 - beta_1) * v
        s = s + v^2                                       # "adagrad"
            beta_2 * s + (1 - beta_2) * v^2               # "adam"
            s - (1 - beta_2) * v^2 * sign(s - v^2)        # "yogi"
        params += lr * m / (sqrt(s) + tau)

    Source: Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2; s is the paper's v_t,
    and the aggregate its Delta_t.

    Args:
        params: float32 [d]; changed in place.
        m: float32 [d], the first moment; changed in place.
        s: float32 [d], >= 0, the second moment; changed in place.
        aggregate: float32 or float64 [d].
        kind: "adagrad", "adam" or "yogi".
        lr: server learning rate.
        beta_1: in [0, 1).
        beta_2: in [0, 1); not used by "adagrad".
        tau: at least 2^-149, the degree of adaptivity: the smaller, the more.
        norm: factor that makes ``aggregate`` a mean.
        models: ``aggregate`` is a sum of models, not of updates.

    Returns:
        ``params``. Coefficients and v are rounded to float32, and each sum with a product is
        rounded once. Magnitudes of m and s below 2^-126 become 0. For the same v, bits do not
        depend on the instruction set.
    """
    compiled.add_adaptive_(params, m, s, aggregate, kind, lr, beta_1, beta_2, tau, norm, models)
    mark_changed(params, m, s)
    return params
