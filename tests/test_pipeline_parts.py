"""The bridge's parts by themselves: messages, batches, routes between two worlds, and what is refused."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dho2_ds import ConfigError, DHO2Config
from dho2_ds.config import parse_config
from dho2_ds.curvature.eigenbasis import Eigenbasis
from dho2_ds.curvature.refresh import Refresh
from dho2_ds.eigenspace import Eigenspace
from dho2_ds.pipeline import supervisor
from dho2_ds.pipeline.batches import announce, decode, encode, receive_tensors
from dho2_ds.pipeline.bridge import Bridge
from dho2_ds.pipeline.door import own_host, split_address
from dho2_ds.pipeline.plan import covers, intervals_from_json, layout_from_json, layout_to_json, routes
from dho2_ds.pipeline.session import BadResult, Job, Session
from dho2_ds.pipeline.wire import Link, LinkError, dtype_named
from dho2_ds.pipeline.worlds import _meeting_point
from dho2_ds.sharding.layout import Layout, flat_slices, parameter_chunks, replicated


def test_a_name_at_loopback_is_not_where_other_machines_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The route out of this machine tells an interface's address independently; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no route to another one")
        outside = probe.getsockname()[0]
    addresses = []
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert own_host("127.0.1.1") == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    with pytest.raises(RuntimeError, match="MASTER_ADDR: must be set"):
        _meeting_point(several=True)
    for _, interface in socket.if_nameindex():
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
        addresses.append(own_host("127.0.1.1"))
    assert outside in addresses


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
    batch: Any = [
        [torch.ones(2, 3, requires_grad=True), None, True],
        {"mask": torch.ones(2, dtype=torch.bool), "names": ("a", 1.5)},
    ]
    tensors: list[Tensor] = []
    form = encode(batch, tensors)
    links[0].send({"batch": form, "tensors": announce(tensors)})
    for tensor in tensors:
        links[0].send_tensor(tensor)
    message = links[1].receive()
    got: Any = decode(message["batch"], receive_tensors(links[1], message["tensors"]), torch.device("cpu"))
    assert torch.equal(got[0][0], batch[0][0]) and got[0][0].requires_grad and got[0][1:] == [None, True]
    assert torch.equal(got[1]["mask"], batch[1]["mask"]) and got[1]["names"] == ("a", 1.5)


class Pair(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize("value", [object(), {1: 2}, [lambda: 0], torch.ones(2).to_sparse(), Pair(1, 2), UserDict(a=1)])
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


def test_a_closed_bridge_has_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    """One that is amid a tensor operation when the interpreter ends makes the process abort."""
    bridge = Bridge(rank=0, world=1, host="127.0.0.1", port=0, token="t", timeout=5.0, doors=lambda: None)
    thread = next(t for t in threading.enumerate() if t.name == "dho2 bridge")
    bridge.close()
    assert not thread.is_alive() and not caplog.records
    bridge.close()


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


def test_a_supervisor_passes_signals_on_and_stops(tmp_path: Path) -> None:
    """SIGUSR1 is the script's business; after SIGTERM there is no other start, whatever the code."""
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent(
            f"""
            import os, signal, sys, time
            sys.path.insert(0, {str(Path(supervisor.__file__).parent)!r})
            import supervisor
            supervisor.supervise()
            signal.signal(signal.SIGUSR1, lambda *_: print("usr1", flush=True))
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            print("started", flush=True)
            while True:
                time.sleep(0.01)
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "usr1\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "" and process.returncode == 0


@pytest.mark.parametrize(
    "address,found",
    [("10.0.0.1:5", ("10.0.0.1", 5)), ("node1", ("node1", 0)), ("[::1]:7", ("::1", 7)), ("::1", ("::1", 0))],
)
def test_addresses(address: str, found: tuple[str, int]) -> None:
    assert split_address(address) == found


@pytest.mark.parametrize("address", ["0.0.0.0:5", ":5", "a:b", "a:70000", "[::]:5"])
def test_addresses_at_which_nobody_is(address: str) -> None:
    with pytest.raises(ConfigError, match="address="):
        split_address(address)


REPORT = {
    "accepted": True, "reason": "", "eigenvalues": [2.0, -1.0], "residuals": [0.1, 0.1], "next_eigenvalue": 0.5,
    "hvps": 3, "seconds": 0.1, "self_check": float("nan"), "tau": 0.1, "transient_bytes": 1,
}  # fmt: skip
RESULT: dict[str, Any] = {"kept": 2, "dtype": "float32", "born": 7, "saved": [0.1, 1.0, 2.0], "report": REPORT}


@pytest.mark.parametrize(
    "change",
    [
        {"kept": 3}, {"dtype": "complex64"}, {"dtype": "nonsense"}, {"born": 8}, {"saved": 3}, {"saved": [1.0]},
        {"report": {**REPORT, "eigenvalues": []}}, {"report": {**REPORT, "eigenvalues": [1.0, 2.0]}},
        {"report": {**REPORT, "eigenvalues": [float("inf"), 1.0]}}, {"report": {**REPORT, "eigenvalues": ["2", 1.0]}},
        {"report": {**REPORT, "eigenvalues": [3.0, 2.0, 1.0], "residuals": [0.1] * 3}, "kept": 3},
        {"report": {**REPORT, "next_eigenvalue": -1.0}}, {"report": {**REPORT, "accepted": "yes"}}, {"report": {}},
        {"report": {**REPORT, "residuals": []}}, {"report": {**REPORT, "eigenvalues": [1.0, 0.0]}},
    ],
)  # fmt: skip
def test_a_malformed_result_never_reaches_training(links: tuple[Link, Link], change: dict[str, Any]) -> None:
    session = Session(1, 1, {"weights": flat_slices({"a": 3}, 1)[0]})
    session.plan(0, {"send": {}, "receive": [[0, 3]]})
    job = Job(1, {"order": {"born": 7}}, [], lambda: None, None, rows=2)
    links[0].send_parts(torch.ones(2, 3), [(0, 3)])
    assert session.take(0, links[1], job, RESULT)
    session.verify(job)
    with pytest.raises(LinkError):
        session.take(0, links[1], job, {**RESULT, **change})


def test_what_is_not_finite_or_differs_is_bad() -> None:
    session = Session(1, 2, {"weights": flat_slices({"a": 3}, 1)[0]})
    job = Job(1, {"order": {"born": 7}}, [], lambda: None, None, rows=2)
    one, other = Refresh(**REPORT), Refresh(**{**REPORT, "next_eigenvalue": 0.4})
    job.results = {0: {"report": one}, 1: {"report": one}}
    job.vectors = torch.ones(2, 3)
    session.verify(job)
    job.results[1] = {"report": other}
    with pytest.raises(BadResult, match="different"):
        session.verify(job)
    job.vectors[1, 2] = float("nan")
    with pytest.raises(BadResult, match="not finite"):
        session.verify(job)
