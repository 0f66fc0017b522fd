"""Reducer: sums, joint decisions, and the count of collectives."""

from __future__ import annotations

import math

import pytest
import torch

from dho2_ds.sharding import Reducer
from tests.distributed import run_ranks


def test_without_group_sums_are_unchanged_and_counted() -> None:
    reducer = Reducer(None)
    values = torch.arange(3.0)
    assert reducer.sum_(values) is values
    assert torch.equal(values, torch.arange(3.0))
    assert (reducer.world_size, reducer.rank, reducer.calls, reducer.elements) == (1, 0, 1, 3)
    reducer.sum_(torch.empty(0))
    assert reducer.calls == 1


@pytest.mark.parametrize(
    ("ok", "fingerprint", "expected"),
    [
        (True, None, True),
        (False, None, False),
        (True, torch.tensor([1.0, -2.0]), True),
        (False, torch.tensor([1.0]), False),
        (True, torch.tensor([1.0, math.nan]), False),
        (True, torch.tensor([math.inf]), False),
        (True, torch.tensor([3, 4]), True),
        (True, torch.tensor(5.0), True),
    ],
)
def test_agree_in_one_process(ok: bool, fingerprint: torch.Tensor | None, expected: bool) -> None:
    reducer = Reducer(None)
    assert reducer.agree(ok, fingerprint) is expected
    assert reducer.calls == 1
    assert reducer.elements == 1 + 2 * (0 if fingerprint is None else fingerprint.numel())


def _reduce_cases(rank: int, world_size: int) -> dict[str, object]:
    import torch.distributed as dist

    reducer = Reducer(dist.group.WORLD)
    results: dict[str, object] = {"place": (reducer.world_size, reducer.rank)}
    summed = reducer.sum_(torch.tensor([1.0, 10.0 * rank], dtype=torch.float64))
    results["sum"] = summed.tolist()
    column = torch.arange(6.0).view(3, 2) + rank
    reducer.sum_(column[:, 1])  # Not contiguous.
    results["strided"] = column.tolist()
    results["calls"] = (reducer.calls, reducer.elements)
    calls = reducer.calls

    alone = Reducer(None)
    results["alone"] = alone.sum_(torch.tensor([1.0 + rank])).item()

    def pick(usual: float, on_rank_1: float) -> torch.Tensor:
        return torch.tensor([0.5, on_rank_1 if rank == 1 else usual], dtype=torch.float64)

    results["agree"] = {
        "same": reducer.agree(True, pick(2.0, 2.0)),
        "no fingerprint": reducer.agree(True),
        "one not ok": reducer.agree(rank != 1, pick(2.0, 2.0)),
        "higher": reducer.agree(True, pick(2.0, 3.0)),
        "lower": reducer.agree(True, pick(2.0, 1.0)),
        "last bit": reducer.agree(True, pick(1.0, math.nextafter(1.0, 2.0))),
        "sign of zero": reducer.agree(True, pick(0.0, -0.0)),
        "nan on one": reducer.agree(True, pick(2.0, math.nan)),
        "nan on all": reducer.agree(True, pick(math.nan, math.nan)),
        "infinite": reducer.agree(True, pick(math.inf, math.inf)),
        "negative": reducer.agree(True, pick(-2.0, -2.0)),
        "ints": reducer.agree(True, torch.tensor([7, rank // 2])),
    }
    results["one call each"] = reducer.calls - calls == len(results["agree"])  # type: ignore[arg-type]

    pair = dist.new_group([0, 1])
    if rank < 2:
        inner = Reducer(pair)
        results["subgroup"] = inner.sum_(torch.tensor([1.0])).item()
    else:
        try:
            Reducer(pair)
        except ValueError as error:
            results["subgroup"] = "not a member" in str(error)
    return results


def test_over_gloo() -> None:
    by_rank = run_ranks(3, _reduce_cases)
    agreed = {"same", "no fingerprint", "negative"}
    for rank, results in enumerate(by_rank):
        assert results["place"] == (3, rank)
        assert results["sum"] == [3.0, 30.0]
        assert results["strided"] == [[0.0 + rank, 6.0], [2.0 + rank, 12.0], [4.0 + rank, 18.0]]
        assert results["calls"] == (2, 5)
        assert results["alone"] == 1.0 + rank  # No group means no communication, whatever is initialised.
        assert {name for name, verdict in results["agree"].items() if verdict} == agreed
        assert results["one call each"]
        assert results["subgroup"] == (2.0 if rank < 2 else True)
