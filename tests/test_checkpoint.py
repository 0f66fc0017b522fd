"""Plain state dicts in one process: bit-exact resume, exchange with torch's optimizers, damage, unusual call orders."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dho2_ds
from tests.engines import ACCUMULATION, SETTINGS, Classifier, Run, groups

SGD = {**SETTINGS, "base": "sgd", "momentum": 0.9, "lr": 5e-2}
RULES = {
    "adaptive adamw": SETTINGS,
    "fosi adamw": {**SETTINGS, "rule": "fosi"},
    "adaptive sgd": SGD,
    "fosi sgd": {**SGD, "rule": "fosi"},
    "bfloat16 rows": {**SETTINGS, "curvature": {**SETTINGS["curvature"], "eigenvector_dtype": "bfloat16"}},
}
PHASES = {1: "warm-up", 5: "refresh due", 6: "after the first", 15: "the next due", 17: "with an old basis"}


def through_file(content: Any) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(run: Run, saved: Any, settings: dict[str, Any]) -> Run:
    """A new run with other initial weights that takes over ``{"model", "optimizer"}``."""
    other = Run(run.kind, 0, 1, settings, seed=3)
    other.model.load_state_dict(saved["model"])
    other.optimizer.load_state_dict(saved["optimizer"])
    other.step_count = run.step_count
    return other


def snapshot(run: Run) -> Any:
    return through_file({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()})


def outcome(run: Run) -> dict[str, Any]:
    stats = run.optimizer.curvature_stats()
    return {key: stats[key] for key in ("steps", "refreshes", "rejected", "hvps", "eigenvalues", "age", "lr_scale")}


@pytest.mark.parametrize("at", PHASES, ids=PHASES.get)
@pytest.mark.parametrize("rule", RULES)
def test_resume_is_bit_exact(rule: str, at: int) -> None:
    run = Run("single", 0, 1, RULES[rule])
    run.train(at)
    saved = snapshot(run)
    losses = run.train(14)
    other = resumed(run, saved, RULES[rule])
    other.step_count = at
    assert other.train(14) == losses
    assert torch.equal(other.weights(), run.weights())
    assert outcome(other) == outcome(run)


def test_resume_is_bit_exact_in_float64() -> None:
    run = Run("single:double", 0, 1, SETTINGS)
    run.train(7)
    other = resumed(run, snapshot(run), SETTINGS)
    assert other.train(12) == run.train(12)


@pytest.mark.parametrize("at", [5, 7])
def test_in_the_middle_of_accumulation(at: int) -> None:
    """Saving there changes nothing, and with the gradients saved as well the run goes on bit for bit."""

    def micro_step(run: Run, micro: int) -> None:
        (run.module(*run.local(run.step_count, micro)) / ACCUMULATION).backward()

    run, undisturbed = Run("single", 0, 1, SETTINGS), Run("single", 0, 1, SETTINGS)
    for each in (run, undisturbed):
        each.train(at)
        each.optimizer.zero_grad()
        micro_step(each, 0)
    saved = snapshot(run)
    gradients = [p.grad.clone() for p in run.model.parameters()]
    other = resumed(run, saved, SETTINGS)
    for p, grad in zip(other.model.parameters(), gradients, strict=True):
        p.grad = grad
    for each in (run, undisturbed, other):
        micro_step(each, 1)
        each.optimizer.step()
        each.step_count += 1
        each.train(10)
    assert torch.equal(run.weights(), undisturbed.weights())
    assert torch.equal(other.weights(), undisturbed.weights())


# -- exchange with torch's optimizers ---------------------------------------------------------------------------------


def plain(kind: str, model: Classifier) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(groups(model, 1e-2), lr=1e-2, momentum=0.9)
    cls = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    return cls(groups(model, 1e-2), lr=1e-2)


def take_steps(run: Run, model: Classifier, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        model(*run.local(step, 0)).backward()
        optimizer.step()


@pytest.mark.parametrize("base", ["adamw", "adam", "sgd"])
def test_torch_checkpoint_is_continued_and_given_back(base: str) -> None:
    """k = 0 is torch's optimizer, so it must go on from torch's checkpoint, and torch from ours, bit for bit."""
    extra = {"momentum": 0.9} if base == "sgd" else {}
    data = Run("single", 0, 1, SETTINGS)
    theirs, ours, back = Classifier(), Classifier(1), Classifier(2)
    torch_optimizer = plain(base, theirs)
    take_steps(data, theirs, torch_optimizer, 0, 4)
    for k in (0, 3):
        optimizer = dho2_ds.DHO2(groups(ours, 1e-2), lr=1e-2, base=base, num_eigenvectors=k, fused=False, **extra)
        ours.load_state_dict(theirs.state_dict())
        optimizer.load_state_dict(through_file(torch_optimizer.state_dict()))
        if k:
            dho2_ds.attach(ours, optimizer)
        given_back = plain(base, back)
        take_steps(data, ours, optimizer, 4, 1)
        back.load_state_dict(ours.state_dict())
        given_back.load_state_dict(through_file(optimizer.state_dict()))
        take_steps(data, ours, optimizer, 5, 3)  # no basis yet: the base optimizer alone
        take_steps(data, back, given_back, 5, 3)
        reference = Classifier()
        reference.load_state_dict(theirs.state_dict())
        continued = plain(base, reference)
        continued.load_state_dict(through_file(torch_optimizer.state_dict()))
        take_steps(data, reference, continued, 4, 4)
        for p, q, r in zip(ours.parameters(), back.parameters(), reference.parameters(), strict=True):
            assert torch.equal(p, r) and torch.equal(q, r)


def test_an_adamw_run_gets_curvature() -> None:
    run = Run("single", 0, 1, SETTINGS)
    theirs = plain("adamw", run.model)
    take_steps(run, run.model, theirs, 0, 3)
    run.optimizer.load_state_dict(theirs.state_dict())
    run.train(16)
    assert outcome(run)["refreshes"] == 2 and outcome(run)["rejected"] == 0
    step = next(iter(run.optimizer.state.values()))["step"]
    assert step == 19  # bias correction goes on; the curvature schedule starts anew
    assert outcome(run)["steps"] == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"amsgrad": True}, r"param group 0: amsgrad=True: must be False"),
        ({"maximize": True}, r"param group 0: maximize=True: must be False"),
        ({"betas": None}, r"param group 0: betas missing: must be a checkpoint of an optimizer like the base 'adamw'"),
    ],
)
def test_other_optimizers_are_refused(change: dict[str, Any], message: str) -> None:
    run = Run("single", 0, 1, SETTINGS)
    state = plain("adamw", run.model).state_dict()
    for group in state["param_groups"]:
        group.update(change)
        for key in [key for key, value in change.items() if value is None]:
            del group[key]
    with pytest.raises(dho2_ds.ConfigError, match=message):
        run.optimizer.load_state_dict(state)


# -- damage -----------------------------------------------------------------------------------------------------------


def without_rows(state: Any) -> None:
    for mine in state["state"].values():
        mine.pop("eigenvector_2")


def not_finite(state: Any) -> None:
    state["state"][1]["eigenvector_0"].view(-1)[0] = float("nan")


def wrong_shape(state: Any) -> None:
    state["state"][0]["eigenvector_1"] = torch.zeros(3)


def no_counters(state: Any) -> None:
    del state["param_groups"][0]["dho2_counters"]


def broken_counters(state: Any) -> None:
    state["param_groups"][0]["dho2_eigenvalues"][0] = float("inf")


def other_rule(state: Any) -> None:
    state["param_groups"][0]["dho2_counters"][3] = 1


@pytest.mark.parametrize("damage", [without_rows, not_finite, wrong_shape, no_counters, broken_counters, other_rule])
def test_a_damaged_basis_is_left_out(damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Base state is whole; training goes on without the basis, says so, and the next refresh brings one."""
    run = Run("single", 0, 1, SETTINGS)
    run.train(7)
    saved = snapshot(run)
    damage(saved["optimizer"])
    logging.getLogger("dho2_ds").addHandler(caplog.handler)
    try:
        other = resumed(run, saved, SETTINGS)
        for p, q in zip(run.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(run.optimizer.state[p]["exp_avg"], other.optimizer.state[q]["exp_avg"])
        other.step()
        assert outcome(other)["eigenvalues"] == []
        assert torch.isfinite(other.weights()).all()
        assert "checkpoint" in caplog.text
        other.train(16)
    finally:
        logging.getLogger("dho2_ds").removeHandler(caplog.handler)
    assert len(outcome(other)["eigenvalues"]) == 4


def test_another_number_of_eigenvectors() -> None:
    """Fewer: the leading ones, and the first left out bounds lr_scale. More: those there are."""
    run = Run("single", 0, 1, SETTINGS)
    run.train(7)
    before = outcome(run)["eigenvalues"]
    fewer = resumed(run, snapshot(run), {**SETTINGS, "num_eigenvectors": 2})
    more = resumed(run, snapshot(run), {**SETTINGS, "num_eigenvectors": 6})
    fewer.step(), more.step()
    assert outcome(fewer)["eigenvalues"] == before[:2]
    assert fewer.optimizer.curvature_stats()["next_eigenvalue"] == abs(before[2])
    assert outcome(more)["eigenvalues"] == before
    none = resumed(run, snapshot(run), {**SETTINGS, "num_eigenvectors": 0})
    none.step()
    state = next(iter(none.optimizer.state.values()))
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}


def test_float32_state_stays_float32_when_parameters_are_bfloat16() -> None:
    """torch's load_state_dict casts state to the parameter's dtype; right for the base state, which torch's fused steps
    want in that dtype, and wrong for eigenvectors."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).bfloat16()
    optimizer = dho2_ds.DHO2(model.parameters(), lr=1e-2, num_eigenvectors=2)
    model(torch.randn(4, 6, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    rows = torch.linalg.qr(torch.randn(21, 2))[0].T
    optimizer.set_eigenbasis(rows, [2.0, 1.0])
    saved = through_file(optimizer.state_dict())
    other = dho2_ds.DHO2(model.parameters(), lr=1e-2, num_eigenvectors=2)
    other.load_state_dict(saved)
    other.step()
    assert other._space.basis is not None and other._space.basis.vectors.dtype == torch.float32
    assert torch.equal(other._space.basis.vectors, rows)


# -- call orders of other tools ---------------------------------------------------------------------------------------


def test_state_dict_before_the_first_step_and_swapped_parameters() -> None:
    """Accelerate's prepare(): state_dict and load_state_dict on a fresh optimizer, then other parameter objects."""
    run, wrapped = Run("single", 0, 1, SETTINGS), Classifier()
    optimizer = dho2_ds.DHO2(groups(wrapped, SETTINGS["lr"]), **SETTINGS)
    state = optimizer.state_dict()
    assert state["state"] == {}
    optimizer.load_state_dict(state)
    new = Classifier()
    mapping = {id(p): q for p, q in zip(wrapped.parameters(), new.parameters(), strict=True)}
    for group in optimizer.param_groups:
        group["params"] = [mapping[id(p)] for p in group["params"]]
    dho2_ds.attach(new, optimizer)
    other = Run("single", 0, 1, SETTINGS)
    other.model, other.module, other.optimizer = new, new, optimizer
    assert other.train(12) == run.train(12)


def test_an_initialising_step_makes_state_and_nothing_else() -> None:
    """torch.distributed.checkpoint calls step() with zero gradients and lr 0 before it loads, attached or not."""
    for attach in (False, True):
        model = Classifier()
        optimizer = dho2_ds.DHO2(groups(model, 1e-2), **SETTINGS)
        if attach:
            dho2_ds.attach(model, optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step(closure=None)
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr
        optimizer.zero_grad()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        names = set(optimizer.state_dict()["state"][0])
        assert names == {"step", "exp_avg", "exp_avg_sq", *(f"eigenvector_{i}" for i in range(4))}
        assert optimizer.steps == 0
        assert all(float(s["step"]) == 0 for s in optimizer.state_dict()["state"].values())


def test_entries_are_views_not_copies() -> None:
    """A state dict costs no second copy of the eigenbasis in one process."""
    run = Run("single", 0, 1, SETTINGS)
    run.train(7)
    storage: Tensor = run.optimizer._space.storage
    entry = run.optimizer.state_dict()["state"][0]["eigenvector_1"]
    assert entry.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
