"""The bridge's parts by themselves: messages, batches, routes between two worlds, and what is refused."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dho2_ds import ConfigError, DHO2Config
from dho2_ds.config import parse_config
from dho2_ds.curvature.eigenbasis import Eigenbasis
from dho2_ds.eigenspace import Eigenspace
from dho2_ds.pipeline import supervisor
from dho2_ds.pipeline.batches import announce, decode, encode, receive_tensors
from dho2_ds.pipeline.plan import covers, intervals_from_json, layout_from_json, layout_to_json, routes
from dho2_ds.pipeline.wire import Link, LinkError, dtype_named
from dho2_ds.sharding.layout import Layout, flat_slices, parameter_chunks, replicated


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    # TCP's options do not exist on this kind of socket.
    pair = (_link(ours), _link(theirs))
    yield pair
    for link in pair:
        link.close()


def _link(sock: socket.socket) -> Link:
    link = Link.__new__(Link)
    link._socket, link.peer, link.until, link.pace = sock, "peer", None, 0.0
    sock.settimeout(2.0)
    return link


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_cross_bit_for_bit(links: tuple[Link, Link], dtype: torch.dtype) -> None:
    rows = torch.randn(3, 10).mul(100).to(dtype)
    links[0].send_parts(rows, [(7, 2), (0, 3)])
    got = torch.zeros(3, 12, dtype=dtype)
    links[1].receive_parts(got, [(1, 2), (5, 3)])
    assert torch.equal(got[:, 1:3], rows[:, 7:9]) and torch.equal(got[:, 5:8], rows[:, :3])


def test_a_batch_crosses_as_it_is(links: tuple[Link, Link]) -> None:
    batch = [[torch.arange(6).view(2, 3), None, True], {"mask": torch.ones(2, dtype=torch.bool), "names": ("a", 1.5)}]
    tensors: list[Tensor] = []
    form = encode(batch, tensors)
    links[0].send({"batch": form, "tensors": announce(tensors)})
    for tensor in tensors:
        links[0].send_tensor(tensor)
    message = links[1].receive()
    got: Any = decode(message["batch"], receive_tensors(links[1], message["tensors"]), torch.device("cpu"))
    assert torch.equal(got[0][0], batch[0][0]) and got[0][1:] == [None, True]
    assert torch.equal(got[1]["mask"], batch[1]["mask"]) and got[1]["names"] == ("a", 1.5)


@pytest.mark.parametrize("value", [object(), {1: 2}, [lambda: 0], torch.ones(2).to_sparse()])
def test_nothing_is_pickled(value: Any) -> None:
    with pytest.raises(TypeError):
        encode([value], [])


@pytest.mark.parametrize(
    "form",
    [{"tensor": 1}, {"tensor": "0"}, {"class": "os.system"}, [1]],
)
def test_a_malformed_batch_is_refused(form: Any) -> None:
    with pytest.raises(LinkError):
        decode(form, [torch.ones(1)], torch.device("cpu"))


def test_malformed_messages_are_refused(links: tuple[Link, Link]) -> None:
    for content in (b"\x00\x00\x00\x01[", b"\x00\x00\x00\x02[]"):
        links[0]._send(memoryview(content))
        with pytest.raises(LinkError):
            links[1].receive()
    links[0]._send(memoryview(b"\xff\xff\xff\xff"))
    with pytest.raises(LinkError, match="must be at most 4096"):
        links[1].receive(4096)
    for announced in ([{"shape": [-1], "dtype": "float32"}], [{"shape": [1 << 40], "dtype": "float32"}]):
        with pytest.raises(LinkError):
            receive_tensors(links[1], announced)
    with pytest.raises(LinkError):
        dtype_named("__import__")


def test_silence_and_an_end_are_noticed(links: tuple[Link, Link]) -> None:
    links[1].set_timeout(0.05)
    with pytest.raises(LinkError, match="timed out"):
        links[1].receive()
    links[0].close()
    with pytest.raises(LinkError, match="closed the connection"):
        links[1].receive()


SIZES = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 40), min_size=1)
KINDS = {"slices": flat_slices, "chunks": parameter_chunks, "replicas": replicated}


@given(SIZES, st.integers(1, 5), st.integers(1, 5), st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(KINDS)))
def test_routes_move_every_element_once(sizes: dict[str, int], a: int, b: int, kind_a: str, kind_b: str) -> None:
    """From any layout over T ranks to any over C ranks and back: every target element arrives, exactly once."""
    source, target = KINDS[kind_a](sizes, a), KINDS[kind_b](sizes, b)
    value = {name: torch.arange(size) + 1000.0 * i + 1 for i, (name, size) in enumerate(sizes.items())}

    def filled(layout: Layout) -> Tensor:
        local = torch.zeros(layout.numel)
        for s in layout.segments:
            local[s.offset : s.offset + s.length] = value[s.name][s.start : s.start + s.length]
        return local

    there = [filled(layout) for layout in source]
    got = [torch.zeros(layout.numel) for layout in target]
    found = routes(source, target)
    for (sender, receiver), (outgoing, incoming) in found.items():
        for (start, length), (at, same) in zip(outgoing, incoming, strict=True):
            assert length == same
            assert not got[receiver][at : at + length].any()  # nobody has been here
            got[receiver][at : at + length] = there[sender][start : start + length]
    for rank, layout in enumerate(target):
        assert torch.equal(got[rank], filled(layout))
        parts = [incoming for (_, receiver), (_, incoming) in found.items() if receiver == rank]
        assert covers(parts, layout)
        assert layout_from_json(layout_to_json(layout)) == layout


def test_intervals_are_checked() -> None:
    assert intervals_from_json([[0, 2], [4, 1]], 5) == [(0, 2), (4, 1)]
    for form in ([[0, 6]], [[-1, 2]], [[0, 2], [1, 1]], [[0, 0]], "x", [[1]]):
        with pytest.raises(LinkError):
            intervals_from_json(form, 5)
    assert not covers([[(0, 2)]], flat_slices({"a": 3}, 1)[0])


@pytest.mark.parametrize(
    "curvature,message",
    [
        ({"ranks": 2}, "curvature.ranks: must be left out with mode='inline'"),
        (
            {"mode": "spread", "address": "a:1", "interval": 100},
            "curvature.address: must be left out with mode='spread'",
        ),
        ({"mode": "dedicated", "ranks": -1}, "curvature.ranks=-1: must be an integer >= 0"),
        ({"mode": "dedicated", "timeout": 0}, "curvature.timeout=0"),
        ({"mode": "dedicated", "swaps": [[5, 3]]}, "must be in rising order"),
        ({"mode": "dedicated", "swaps": [[5, 9], [7, 12]]}, "must be in rising order"),
        ({"mode": "dedicated", "spread_every": 2}, "curvature.spread_every: must be left out with mode='dedicated'"),
    ],
)
def test_settings_that_are_refused(curvature: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"curvature": curvature})
    assert message in str(caught.value)


def test_an_old_basis_is_believed_less() -> None:
    """Up to two intervals as it is, then falling with age."""
    space = Eigenspace(DHO2Config(curvature={"interval": 10}))
    assert space.trust(100) == 1.0
    space.basis = Eigenbasis(torch.eye(2), torch.ones(2, dtype=torch.float64), 0.1, born=100)
    assert [space.trust(step) for step in (100, 110, 120, 140, 200)] == [1.0, 1.0, 1.0, 0.5, 0.2]


def run_supervised(tmp_path: Path, script: str) -> tuple[int, str]:
    path = tmp_path / "script.py"
    head = f"import os, signal, sys\nsys.path.insert(0, {str(Path(supervisor.__file__).parent)!r})\n"
    path.write_text(head + "import supervisor\nsupervisor.supervise()\n" + textwrap.dedent(script))
    done = subprocess.run([sys.executable, str(path), "an argument"], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_a_supervised_process_is_started_again(tmp_path: Path) -> None:
    code, text = run_supervised(
        tmp_path,
        """
        assert sys.argv[1:] == ["an argument"] and supervisor.supervised()
        print("token", os.environ.get("TOKEN"), flush=True)
        supervisor.remember({"TOKEN": "kept"})
        if "TOKEN" not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert code == 0 and "token None" in text and "code -9; it is started again" in text and "token kept" in text


def test_a_refused_process_is_not_started_again(tmp_path: Path) -> None:
    code, text = run_supervised(tmp_path, "print('once'); sys.exit(supervisor.REFUSED)")
    assert code == 0 and text.count("once") == 1
