"""The reference optimizer against torch.optim, hand-derived steps on quadratics, and its schedule."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference import Reference

F64 = torch.float64
H = torch.tensor([50.0, -20.0, 3.0, 2.0, 1.0, 0.5], dtype=F64)  # Curvatures of the quadratics below.
START = torch.tensor([1.0, -2.0, 3.0, 0.7, -0.4, 2.5], dtype=F64)


def _tanh_net(params: list[Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return ((torch.tanh(x @ params[0] + params[1]) @ params[2] - y) ** 2).mean()


def _net(seed: int = 0) -> tuple[list[Tensor], list[list[tuple[Tensor, Tensor]]]]:
    gen = torch.Generator().manual_seed(seed)
    params = [torch.randn(*shape, generator=gen, dtype=F64) for shape in [(3, 4), (4,), (4, 2)]]
    steps = [
        [(torch.randn(8, 3, generator=gen, dtype=F64), torch.randn(8, 2, generator=gen, dtype=F64)) for _ in range(2)]
        for _ in range(12)
    ]
    return params, steps


def _quadratic(params: list[Tensor], batch: Any) -> Tensor:
    return 0.5 * (H * torch.cat(params) ** 2).sum() * batch


def _on_quadratic(groups: list[dict[str, Any]], **settings: Any) -> tuple[Reference, list[Tensor]]:
    params = [START[:3].clone(), START[3:].clone()]
    return Reference(_quadratic, params, groups, **settings), params


@pytest.mark.parametrize("base", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("rule", ["adaptive", "fosi"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_without_curvature_it_is_the_torch_optimizer(base: str, rule: str, nesterov: bool, k: int) -> None:
    """k = 0, and k > 0 before the first refresh; two groups, a schedule, accumulation and clipping."""
    params, steps = _net()
    twins = [p.clone().requires_grad_() for p in params]
    groups = [
        {"params": [0, 2], "lr": 0.03, "weight_decay": 0.1},
        {"params": [1], "lr": 0.01, "weight_decay": 0.0},
    ]
    named = [{**group, "params": [twins[i] for i in group["params"]]} for group in groups]
    optimizer: torch.optim.Optimizer
    if base == "sgd":
        optimizer = torch.optim.SGD(named, momentum=0.9, nesterov=nesterov)
    else:
        kind = torch.optim.AdamW if base == "adamw" else torch.optim.Adam
        optimizer = kind(named, betas=(0.8, 0.95), eps=1e-3)
    reference = Reference(
        _tanh_net,
        params,
        groups,
        base=base,  # type: ignore[arg-type]
        rule=rule,  # type: ignore[arg-type]
        betas=(0.8, 0.95),
        eps=1e-3,
        momentum=0.9,
        nesterov=nesterov,
        k=k,
        warmup_steps=100,
        clip=0.5,
    )
    for t, batches in enumerate(steps):
        optimizer.zero_grad()
        loss = sum(_tanh_net(twins, batch) / len(batches) for batch in batches)
        assert isinstance(loss, Tensor)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twins, 0.5)
        assert reference.step(batches) == pytest.approx(loss.item(), rel=1e-12)
        optimizer.step()
        for mine, theirs in zip(reference.groups, optimizer.param_groups, strict=True):
            mine["lr"] = theirs["lr"] = theirs["lr"] * (0.9 if t % 2 else 1.1)
        for p, twin in zip(params, twins, strict=True):
            # torch's clip factor is clip / (norm + 1e-6) as well.
            torch.testing.assert_close(p, twin, rtol=1e-11, atol=1e-13)
    assert reference.refreshes == []


def test_hessian_is_the_derivative_of_the_gradient() -> None:
    params, steps = _net()
    reference = Reference(_tanh_net, params, [{"params": [0, 1, 2], "lr": 0.1, "weight_decay": 0.0}])
    batch, w, delta = steps[0][0], reference.weights(), 1e-6
    dense = reference.hessian(batch)
    for i in range(w.numel()):
        sides = []
        for sign in (1, -1):
            moved = w.clone()
            moved[i] += sign * delta
            reference._write(moved)
            sides.append(reference._flat_gradient(batch)[1])
        torch.testing.assert_close((sides[0] - sides[1]) / (2 * delta), dense[i], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_refresh_schedule(warmup: int) -> None:
    reference, _ = _on_quadratic(
        [{"params": [0, 1], "lr": 1e-3, "weight_decay": 0.0}], base="sgd", k=2, warmup_steps=warmup, interval=3
    )
    for _ in range(12):
        reference.step([1.0])
    first = max(1, warmup)
    assert reference.refreshes == [t for t in range(1, 12) if t >= first and (t - first) % 3 == 0]


def test_refresh_sees_the_next_step_s_first_batch() -> None:
    reference, _ = _on_quadratic([{"params": [0, 1], "lr": 1e-3, "weight_decay": 0.0}], base="sgd", k=2)
    reference.step([1.0, 1.0])
    reference.step([7.0, 1.0])  # The batch scales the loss.
    torch.testing.assert_close(reference.eigenvalues, 7 * H[:2])
    assert reference.next_eigenvalue == pytest.approx(21.0)


def test_clipping_follows_deepspeed() -> None:
    reference, params = _on_quadratic([{"params": [0, 1], "lr": 1.0, "weight_decay": 0.0}], base="sgd", clip=2.0)
    reference.step([1.0])
    g = H * START
    torch.testing.assert_close(torch.cat(params).detach(), START - g / ((g.norm() + 1e-6) / 2.0))


def test_adaptive_sgd_on_a_quadratic() -> None:
    """Leading directions: a Newton step of size alpha along |lambda|; the others: SGD with lr * s."""
    settings: dict[str, Any] = dict(base="sgd", k=2, newton_lr=0.5, max_lr_scale=3.0)
    reference, params = _on_quadratic([{"params": [0, 1], "lr": 0.01, "weight_decay": 0.0}], **settings)
    reference.step([1.0])
    w = (1 - 0.01 * H) * START
    torch.testing.assert_close(torch.cat(params).detach(), w)
    reference.groups[0]["lr"] = 0.005  # Half the initial lr: alpha is 0.25.
    reference.step([1.0])
    expected = w - 0.005 * 3.0 * H * w  # |lambda_1 / lambda_3| = 16.7, clipped to 3
    expected[0] = w[0] * (1 - 0.25)
    expected[1] = w[1] * (1 + 0.25)  # Negative curvature: away from the saddle.
    assert reference.scale == 3.0
    torch.testing.assert_close(torch.cat(params).detach(), expected)


@pytest.mark.parametrize(("nesterov", "decay"), [(False, 0.0), (True, 0.1)])
def test_adaptive_sgd_moves_along_the_base_direction(nesterov: bool, decay: float) -> None:
    settings: dict[str, Any] = dict(base="sgd", momentum=0.9, nesterov=nesterov, k=2, newton_lr=0.5, max_lr_scale=1.5)
    reference, params = _on_quadratic([{"params": [0, 1], "lr": 0.01, "weight_decay": decay}], **settings)
    w, buf = START.clone(), torch.zeros(6, dtype=F64)
    for t in range(4):
        g = H * w + decay * w
        buf = 0.9 * buf + g
        m = g + 0.9 * buf if nesterov else buf
        size = torch.full((6,), 0.01 * (1.5 if t else 1.0), dtype=F64)
        if t:
            size[:2] = (0.5 / H[:2].abs()).clamp(max=0.01 * 1.5)  # no further than the base
        w = w - size * m
        reference.step([1.0])
        torch.testing.assert_close(torch.cat(params).detach(), w)


def test_adaptive_adam_on_a_quadratic_with_two_learning_rates() -> None:
    """Scalar by scalar: with a diagonal H every coordinate is an eigenvector of the preconditioned Hessian."""
    lrs, decays = [0.02] * 3 + [0.005] * 3, [0.1] * 3 + [0.0] * 3
    settings: dict[str, Any] = dict(betas=(0.8, 0.9), eps=1e-2, k=2, newton_lr=0.3, max_lr_scale=2.0, interval=100)
    groups = [
        {"params": [0], "lr": 0.02, "weight_decay": 0.1},
        {"params": [1], "lr": 0.005, "weight_decay": 0.0},
    ]
    reference, params = _on_quadratic(groups, base="adamw", **settings)
    w, m, v = START.tolist(), [0.0] * 6, [0.0] * 6
    lead: dict[int, float] = {}
    scale = 1.0
    for t in range(1, 6):
        if t == 2:  # Refresh after step 1, with the second moments of step 1.
            curvature = [lrs[i] / 0.02 / (math.sqrt(v[i] / (1 - 0.9)) + 1e-2) * float(H[i]) for i in range(6)]
            order = sorted(range(6), key=lambda i: -abs(curvature[i]))
            lead = {i: abs(curvature[i]) for i in order[:2]}
            scale = min(max(abs(curvature[order[0]] / curvature[order[2]]), 1.0), 2.0)
        for i in range(6):
            g = float(H[i]) * w[i]
            w[i] *= 1 - lrs[i] * decays[i]
            m[i] = 0.8 * m[i] + 0.2 * g
            v[i] = 0.9 * v[i] + 0.1 * g * g
            direction = m[i] / (1 - 0.8**t) / (math.sqrt(v[i] / (1 - 0.9**t)) + 1e-2)
            if i in lead:  # The Newton step replaces lr * s: r (alpha / lambda) r m, r^2 = rho / (sqrt(v_hat) + eps).
                w[i] -= min(0.3 / lead[i], 0.02 * scale) * lrs[i] / 0.02 * direction
            else:
                w[i] -= lrs[i] * scale * direction
        reference.step([1.0])
        torch.testing.assert_close(torch.cat(params).detach(), torch.tensor(w, dtype=F64), rtol=1e-10, atol=1e-12)
    assert reference.refreshes == [1] and scale > 1.0


def test_fosi_sgd_on_a_quadratic() -> None:
    settings: dict[str, Any] = dict(base="sgd", rule="fosi", momentum=0.9, k=2, newton_lr=0.2, max_lr_scale=2.0)
    reference, params = _on_quadratic([{"params": [0, 1], "lr": 0.01, "weight_decay": 0.0}], **settings)
    w, buf, velocity = START.clone(), torch.zeros(6, dtype=F64), torch.zeros(6, dtype=F64)
    lead = torch.tensor([True, True, False, False, False, False])
    for t in range(6):
        g = H * w
        if t == 0:
            buf = g
            w = w - 0.01 * buf
        else:  # Refreshed before every step, with eigenvectors of either sign: the velocity must survive it.
            velocity = 0.9 * velocity + g * lead
            buf = 0.9 * buf + g * ~lead
            w = w - 2.0 * 0.01 * buf * ~lead - 0.2 * velocity / H.abs() * lead  # s = min(50 / 20, 2)
        reference.step([1.0])
        torch.testing.assert_close(torch.cat(params).detach(), w)
        torch.testing.assert_close(reference.buf, buf)  # The step hides what the state holds inside the span.
    assert len(reference.refreshes) == 5


def test_fosi_adam_on_a_quadratic() -> None:
    settings: dict[str, Any] = dict(base="adamw", rule="fosi", betas=(0.8, 0.9), eps=1e-2, k=2, newton_lr=0.2)
    reference, params = _on_quadratic([{"params": [0, 1], "lr": 0.01, "weight_decay": 0.1}], **settings)
    w, m, v, velocity = (START.clone(), *(torch.zeros(6, dtype=F64) for _ in range(3)))
    lead = torch.tensor([True, True, False, False, False, False])
    for t in range(1, 6):
        mine = lead if t > 1 else torch.zeros_like(lead)
        g = H * w
        velocity = 0.8 * velocity + 0.2 * g * mine
        m = 0.8 * m + 0.2 * g * ~mine
        v = 0.9 * v + 0.1 * (g * ~mine) ** 2
        direction = m / (1 - 0.8**t) / ((v / (1 - 0.9**t)).sqrt() + 1e-2)
        w = w * (1 - 0.01 * 0.1) - 0.01 * direction * ~mine - 0.2 * velocity / H.abs() * mine  # s = 1 for Adam
        reference.step([1.0])
        torch.testing.assert_close(torch.cat(params).detach(), w)
        torch.testing.assert_close(reference.exp_avg, m)  # The step hides what the state holds inside the span.
        torch.testing.assert_close(reference.exp_avg_sq, v)
    assert reference.scale == 1.0


def test_fosi_velocity_is_mapped_between_bases() -> None:
    """The part of the old velocity inside the new span stays, the rest is gone."""
    params, steps = _net()
    reference = Reference(
        _tanh_net, params, [{"params": [0, 1, 2], "lr": 0.05, "weight_decay": 0.0}], base="sgd", rule="fosi", k=3
    )
    reference.step(steps[0])
    reference.step(steps[1])
    assert reference.Q is not None
    old = reference.Q.T @ reference.velocity
    reference.refresh(steps[2][0])
    new = reference.Q.T @ reference.velocity
    torch.testing.assert_close(new, reference.Q.T @ (reference.Q @ old))
    assert 0 < new.norm() < old.norm()


@pytest.mark.parametrize("rule", ["adaptive", "fosi"])
def test_more_eigenvectors_than_parameters_is_newton(rule: str) -> None:
    params = [START[:2].clone()]

    def loss(params: list[Tensor], batch: Any) -> Tensor:
        return (H[:2].abs() * params[0] ** 2).sum() / 2

    reference = Reference(
        loss,
        params,
        [{"params": [0], "lr": 10.0, "weight_decay": 0.0}],  # so far the trust region reaches
        base="sgd",
        rule=rule,
        k=5,
        newton_lr=1.0,  # type: ignore[arg-type]
    )
    reference.step([None])
    reference.step([None])
    torch.testing.assert_close(params[0].detach(), torch.zeros(2, dtype=F64))


def test_bad_arguments_are_refused() -> None:
    group = {"params": [0], "lr": 0.1, "weight_decay": 0.0}
    with pytest.raises(ValueError, match="float64"):
        Reference(_quadratic, [torch.zeros(2)], [group])
    with pytest.raises(ValueError, match="exactly once"):
        Reference(_quadratic, [torch.zeros(2, dtype=F64)], [group, group])
