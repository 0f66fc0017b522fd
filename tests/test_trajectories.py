"""Thirty steps with three refreshes on every engine, against a plain float64 reference with a dense Hessian.

Two param groups (decay, no decay), gradient accumulation 2 and clipping are on everywhere. The tolerances: against
the reference 1e-4 in loss and 1e-3 in weights, the size of float32 rounding and of 3e-5 relative error per
finite-difference product, amplified over 30 steps; between engines, which differ in the order of float32 sums only,
1e-5 of the largest loss, 3e-5 of the loss at the same step (1.5e-5 was seen) and 5e-5 in weights (2.4e-5).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests import engines
from tests.distributed import run_ranks
from tests.reference import Reference

STEPS = 30
RULES: dict[str, dict[str, Any]] = {
    "adaptive-adamw": {},
    "fosi-adamw": {"rule": "fosi"},
    "adaptive-adam": {"base": "adam", "weight_decay": 0.0},
    "adaptive-sgd": {"base": "sgd", "momentum": 0.9, "nesterov": True, "lr": 0.05},
    "fosi-sgd": {"base": "sgd", "rule": "fosi", "momentum": 0.9, "lr": 0.05},
    "fosi-adam": {"base": "adam", "rule": "fosi"},
    "adaptive-sgd-without-momentum": {"base": "sgd", "momentum": 0.0, "lr": 0.05},
    "fosi-sgd-without-momentum": {"base": "sgd", "rule": "fosi", "momentum": 0.0, "lr": 0.05},
    # Groups of different lr and decay under a schedule, which the base optimizer, P and the Newton step have to follow.
    "adaptive-adamw-scheduled": {},
    "fosi-adamw-scheduled": {"rule": "fosi"},
    "auto-adamw": {"lr": "auto", "curvature": {**engines.SETTINGS["curvature"], "first_interval": 5, "interval": 15}},
    "auto-sgd": {"lr": "auto", "base": "sgd", "momentum": 0.9, "nesterov": True, "lr_fraction": 0.2},
}
SHARDED = ["zero0", "zero1", "zero2", "zero3", "zero3:sub_groups"]


def settings(rule: str) -> dict[str, Any]:
    found = {**engines.SETTINGS, **RULES[rule]}
    if found["lr"] == "auto":
        del found["max_lr_scale"]
    return found


def scheduled(rule: str) -> bool:
    return rule.endswith("-scheduled")


@cache
def reference(rule: str, decay: float | None = None) -> tuple[list[float], torch.Tensor]:
    """Losses and final weights of the float64 reference."""
    chosen = settings(rule)
    auto = chosen["lr"] == "auto"
    lr = 1e-3 if auto else chosen["lr"]
    smaller, fade = (engines.SMALLER, engines.FADE) if scheduled(rule) else (1.0, 1.0)
    params = [p.detach().double() for p in engines.Classifier().parameters()]
    if decay is None:
        decay = engines.decay_of(chosen)
    model = Reference(
        engines.classifier_loss,
        params,
        [
            {"params": [0, 1, 2], "lr": lr, "weight_decay": decay},
            {"params": [3, 4, 5], "lr": lr * smaller, "weight_decay": 0.0},
        ],
        base=chosen.get("base", "adamw"),
        rule=chosen.get("rule", "adaptive"),
        momentum=chosen.get("momentum", 0.0),
        nesterov=chosen.get("nesterov", False),
        k=chosen["num_eigenvectors"],
        newton_lr=chosen["newton_lr"],
        max_lr_scale=chosen.get("max_lr_scale", 1.0),
        lr_fraction=chosen.get("lr_fraction", 0.25) if auto else None,
        warmup_steps=chosen["curvature"]["warmup_steps"],
        interval=chosen["curvature"]["interval"],
        first_interval=chosen["curvature"].get("first_interval"),
        clip=engines.CLIP,
    )
    losses = []
    for step in range(STEPS):
        losses.append(model.step([engines.micro_batch(step, micro) for micro in range(engines.ACCUMULATION)]))
        for group in model.groups:
            group["lr"] *= fade
    assert len(model.refreshes) == 3
    return losses, model.weights()


def check(rule: str, result: dict[str, Any], label: str, decay: float | None = None) -> None:
    losses, weights = reference(rule, decay)
    got = torch.tensor(result["losses"], dtype=torch.float64)
    want = torch.tensor(losses, dtype=torch.float64)
    assert ((got - want).abs() / want).max() < 1e-4, (label, (got - want).abs().max())
    assert (result["weights"] - weights).norm() / weights.norm() < 1e-3, label
    assert result["stats"]["refreshes"] == 3 and result["stats"]["rejected"] == 0, (label, result["stats"])


@pytest.mark.parametrize("rule", list(RULES))
def test_one_process_matches_reference(rule: str) -> None:
    chosen = settings(rule)
    run = engines.Run("single", 0, 1, chosen, scheduled=scheduled(rule))
    result = {"losses": run.train(STEPS), "weights": run.weights(), "stats": run.optimizer.curvature_stats()}
    check(rule, result, "single")


def test_double_precision_matches_reference_closely() -> None:
    """In float64 only the Lanczos stop (residual 1e-4, so 1e-8 in eigenvalues, 1e-4/gap in vectors) is left."""
    run = engines.Run("single:double", 0, 1, settings("adaptive-adamw"))
    losses, weights = reference("adaptive-adamw")
    got = run.train(STEPS)
    assert max(abs(a - b) / b for a, b in zip(got, losses, strict=True)) < 1e-6
    assert (run.weights() - weights).norm() / weights.norm() < 1e-5


def test_groups_with_different_learning_rates_match_reference() -> None:
    """The second group has a tenth of the lr: the ratio belongs into the preconditioner."""
    chosen = settings("adaptive-adamw")
    model = engines.Classifier().double()
    import dho2_ds

    optimizer = dho2_ds.DHO2(
        [{"params": list(model.w)}, {"params": list(model.b), "lr": 1e-3}], weight_decay=0.05, **chosen
    )
    dho2_ds.attach(model, optimizer)
    params = [p.detach().double() for p in engines.Classifier().parameters()]
    plain = Reference(
        engines.classifier_loss,
        params,
        [
            {"params": [0, 1, 2], "lr": 1e-2, "weight_decay": 0.05},
            {"params": [3, 4, 5], "lr": 1e-3, "weight_decay": 0.05},
        ],
        k=4,
        newton_lr=0.2,
        max_lr_scale=2.0,
        warmup_steps=5,
        interval=10,
    )
    for step in range(STEPS):
        batch = engines.micro_batch(step, 0)
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        assert abs(loss.item() - plain.step([batch])) < 1e-6 * loss.item()


@pytest.mark.parametrize(
    ("world", "rule"),
    [
        (1, "adaptive-adamw"),
        pytest.param(2, "adaptive-adamw", marks=pytest.mark.deepspeed),
        (2, "adaptive-adamw-scheduled"),
        (2, "fosi-adamw-scheduled"),
        (2, "auto-adamw"),
        *[
            pytest.param(w, r, marks=[pytest.mark.slow, pytest.mark.timeout(600)])
            for w, r in [
                (1, "fosi-adamw"),
                (4, "adaptive-adamw"),
                (2, "fosi-adamw"),
                (4, "fosi-adamw"),
                (2, "adaptive-adam"),
                (2, "adaptive-sgd"),
                (4, "adaptive-sgd"),
                (2, "fosi-sgd"),
                (3, "adaptive-adamw"),
            ]
        ],
    ],
)
def test_engines_match_reference_and_each_other(world: int, rule: str) -> None:
    kinds = (["ddp"] if world > 1 else ["single"]) + SHARDED
    results = run_ranks(world, engines.train_worker, kinds, settings(rule), STEPS, scheduled(rule), timeout=580)
    first = results[0][kinds[0]]
    losses = torch.tensor(first["losses"], dtype=torch.float64)
    for kind in kinds:
        got = results[0][kind]
        check(rule, got, f"{kind} on {world}")
        assert all(torch.equal(other[kind]["weights"], got["weights"]) for other in results), (kind, "ranks disagree")
        apart = (torch.tensor(got["losses"], dtype=torch.float64) - losses).abs()
        assert apart.max() < 1e-5 * losses.max() and (apart / losses).max() < 3e-5, (kind, apart / losses)
        assert (got["weights"] - first["weights"]).norm() < 5e-5 * first["weights"].norm(), kind


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.deepspeed), 4])
def test_variants_match_reference(world: int) -> None:
    """Offload, round-robin gradients, no resident small parameters: the same float32 trajectory."""
    kinds = ["zero2:offload", "zero3:offload", "zero1:round_robin", "zero2:round_robin", "zero3:persistence0"]
    results = run_ranks(world, engines.train_worker, kinds, settings("adaptive-adamw"), STEPS, timeout=580)
    for kind in kinds:
        check("adaptive-adamw", results[0][kind], f"{kind} on {world}")


BF16 = ["zero0:bf16", "zero1:bf16", "zero2:bf16", "zero3:bf16", "zero1:bf16_accum"]


@pytest.mark.deepspeed
@pytest.mark.timeout(400)
def test_bf16_with_float32_masters_trains_alike() -> None:
    """bfloat16 compute: 2^-9 relative rounding per operation, and 3-6 % error per product, so 3 % in the loss."""
    results = run_ranks(2, engines.train_worker, BF16, settings("adaptive-adamw"), STEPS, timeout=380)
    losses, _ = reference("adaptive-adamw")
    for kind in BF16:
        got = results[0][kind]
        assert abs(got["losses"][-1] - losses[-1]) / losses[-1] < 0.03, (kind, got["losses"][-1], losses[-1])
        # The step-size check may reject one: bfloat16 kernels round differently from CPU to CPU.
        stats = got["stats"]
        assert stats["refreshes"] >= 2 and stats["refreshes"] + stats["rejected"] == 3, (kind, stats)
