"""Training on several nodes over a real network, by the launchers that users have.

The first nodes train, one process each; with mode ``dedicated`` the last one computes curvature. Every run is compared
with the same processes on one machine, and the cables' counters tell that it was not one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import Node, network, why_not

_reason = why_not()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))

SCRIPT = Path(__file__).parent / "nodes_script.py"
STEPS = 12
SETTINGS: dict[str, Any] = {"lr": 1e-2, "num_eigenvectors": 2}
CURVATURE: dict[str, dict[str, Any]] = {
    "inline": {"warmup_steps": 3, "interval": 5, "lanczos_steps": 12},
    # A recorded schedule, so that runs are alike however long a refresh takes.
    "dedicated": {"mode": "dedicated", "ranks": 1, "warmup_steps": 3, "interval": 5, "lanczos_steps": 12,
                  "timeout": 100, "swaps": [[3, 5], [8, 10]]},
}  # fmt: skip
ENVIRONMENT = {
    # What a user sets too where a machine's own name is at loopback, as Debian has it.
    "GLOO_SOCKET_IFNAME": "eth0",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/sbin", "/usr/bin", "/bin"]),
    "PYTHONPATH": str(Path(__file__).parents[1]),
}


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "DHO2_JOIN")}
    return {**kept, **ENVIRONMENT, "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}


def arguments(folder: Path, mode: str, host: str) -> list[str]:
    """Of the script; writes the configuration."""
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "DHO2", "params": {**SETTINGS, "curvature": CURVATURE[mode]}},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return [str(SCRIPT), str(path), str(folder / "result.json"), host, str(STEPS)]


def wait_for(processes: Sequence[subprocess.Popen[bytes]], folder: Path, seconds: float = 150.0) -> dict[str, Any]:
    """Wait until all have ended, and return what the script wrote; a failure shows what they printed."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            break
        time.sleep(0.1)
    codes = [process.poll() for process in processes]
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait(30)
    printed = "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in folder.glob("*.log"))
    assert codes == [0] * len(codes), f"{codes}\n{printed}"
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def torchrun(nodes: int, rank: int, address: str, port: int = 29500) -> list[str]:
    where = ["--nnodes", str(nodes), "--node_rank", str(rank), "--master_addr", address, "--master_port", str(port)]
    return [sys.executable, "-m", "torch.distributed.run", *where, "--nproc_per_node", "1"]


@pytest.fixture(scope="module")
def on_one_machine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], dict[str, Any]]:
    @cache
    def result(mode: str, host: str, processes: int) -> dict[str, Any]:
        """The same processes on one node, which has no cable in use."""
        folder = tmp_path_factory.mktemp("one")
        command = [*torchrun(1, 0, "node0")[:-1], str(processes), *arguments(folder, mode, host)]
        with network(1, folder) as (node,):
            return wait_for([node.start(command, environment(folder), folder / "one.log")], folder)

    return result


def check(found: dict[str, Any], expected: dict[str, Any] | None, nodes: Sequence[Node], training: int) -> None:
    """It trained, with two refreshes, as on one machine if that is known, and the cables were used."""
    assert (found["world"], found["refreshes"]) == (training, 2)
    assert found["losses"][-1] < 0.5 * found["losses"][0]
    if expected is not None:
        assert found == {**expected, "losses": pytest.approx(expected["losses"], rel=1e-4)}
    assert all(node.traffic() > 10_000 for node in nodes), [node.traffic() for node in nodes]


# -- launchers: each starts the script once on every node --------------------------------------------------------


def start_torchrun(nodes: list[Node], folder: Path, script: list[str]) -> list[subprocess.Popen[bytes]]:
    """One shell per node."""
    commands = [[*torchrun(len(nodes), i, nodes[0].name), *script] for i in range(len(nodes))]
    return [n.start(c, environment(folder), folder / f"{n.name}.log") for n, c in zip(nodes, commands, strict=True)]


def hostfile(nodes: list[Node], folder: Path) -> str:
    path = folder / "hostfile"
    path.write_text("".join(f"{node.name} slots=1\n" for node in nodes))
    return str(path)


def start_no_ssh(nodes: list[Node], folder: Path, script: list[str]) -> list[subprocess.Popen[bytes]]:
    """``deepspeed --no_ssh``: one shell per node."""
    where = ["--hostfile", hostfile(nodes, folder), "--no_ssh", "--master_addr", nodes[0].name]
    commands = [["deepspeed", *where, "--node_rank", str(i), *script] for i in range(len(nodes))]
    return [n.start(c, environment(folder), folder / f"{n.name}.log") for n, c in zip(nodes, commands, strict=True)]


def start_pdsh(nodes: list[Node], folder: Path, script: list[str]) -> list[subprocess.Popen[bytes]]:
    """``deepspeed`` on the first node, which reaches the others by pdsh and ssh."""
    by_ssh = {**environment(folder), "PDSH_SSH_ARGS_APPEND": f"-F {folder / 'ssh_config'}"}
    where = ["--hostfile", hostfile(nodes, folder), "--no_ssh_check", "--master_addr", nodes[0].name]
    return [nodes[0].start(["deepspeed", *where, *script], by_ssh, folder / "pdsh.log")]


def start_openmpi(nodes: list[Node], folder: Path, script: list[str]) -> list[subprocess.Popen[bytes]]:
    """``deepspeed --launcher openmpi``."""
    where = ["--hostfile", hostfile(nodes, folder), "--no_ssh_check", "--master_addr", nodes[0].name]
    command = ["deepspeed", *where, "--launcher", "openmpi", "--launcher_args", by_ssh(folder), *script]
    return [nodes[0].start(command, environment(folder), folder / "openmpi.log")]


def start_mpirun(nodes: list[Node], folder: Path, script: list[str]) -> list[subprocess.Popen[bytes]]:
    """Plain ``mpirun python``."""
    command = ["mpirun", "-n", str(len(nodes)), "--hostfile", hostfile(nodes, folder), *shlex.split(by_ssh(folder))]
    return [nodes[0].start([*command, sys.executable, *script], environment(folder), folder / "mpirun.log")]


def by_ssh(folder: Path) -> str:
    return f"--prtemca plm_ssh_args '-F {folder / 'ssh_config'}'"


@contextmanager
def ssh_servers(nodes: Sequence[Node], folder: Path) -> Iterator[None]:
    """One on every node, with keys and settings of its own; a login has the environment of a user's shell profile."""
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True, timeout=30)
    public = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text("".join(f"{n.name},{n.address} {public}" for n in nodes))
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    profile = " ".join(f"{name}={value}" for name, value in {**ENVIRONMENT, "TMPDIR": "/tmp"}.items())
    server = f"""
        HostKey {folder}/host_key
        AuthorizedKeysFile {folder}/authorized_keys
        PermitRootLogin prohibit-password
        StrictModes no
        UsePAM no
        PidFile none
        SetEnv {profile}
    """
    client = f"""
        IdentityFile {folder}/user_key
        IdentitiesOnly yes
        UserKnownHostsFile {folder}/known_hosts
        BatchMode yes
    """
    (folder / "sshd_config").write_text(server)
    (folder / "ssh_config").write_text(client)
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd wants an empty folder
    command = [shutil.which("sshd") or "/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")]
    for node in nodes:
        node.start(command, os.environ, folder / f"sshd-{node.name}.log")
    yield


Launcher = Callable[[list[Node], Path, list[str]], list[subprocess.Popen[bytes]]]
BY_SSH = (start_pdsh, start_openmpi, start_mpirun)


def need(launcher: Launcher) -> None:
    if launcher in BY_SSH and shutil.which("sshd", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("no ssh server; apt-get install openssh-server")
    if launcher is start_pdsh and shutil.which("pdsh") is None:
        pytest.skip("no pdsh; apt-get install pdsh")
    if launcher in (start_openmpi, start_mpirun) and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed; pip install 'dho2-ds[mpi]'")


def run(launcher: Launcher, mode: str, host: str, folder: Path, expected: Callable[..., dict[str, Any]]) -> None:
    need(launcher)
    count = 3 if mode == "dedicated" else 2
    with network(count, folder) as nodes:
        if launcher in BY_SSH:
            with ssh_servers(nodes, folder):
                found = wait_for(launcher(nodes, folder, arguments(folder, mode, host)), folder)
        else:
            found = wait_for(launcher(nodes, folder, arguments(folder, mode, host)), folder)
        check(found, expected(mode, host, count), nodes, training=2)


def test_curvature_on_another_node(tmp_path: Path) -> None:
    """The quick one: processes that have a launcher's variables, but no launcher."""
    script = [sys.executable, *arguments(tmp_path, "dedicated", "fsdp2")]
    with network(2, tmp_path) as nodes:
        processes = []
        for rank, node in enumerate(nodes):
            own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            own |= {"MASTER_ADDR": nodes[0].name, "MASTER_PORT": "29500"}
            processes.append(node.start(script, {**environment(tmp_path), **own}, tmp_path / f"{node.name}.log"))
        check(wait_for(processes, tmp_path), None, nodes, training=1)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["inline", "dedicated"])
@pytest.mark.parametrize("launcher", [start_no_ssh, start_pdsh, start_openmpi, start_mpirun])
def test_deepspeed(
    launcher: Launcher, mode: str, tmp_path: Path, on_one_machine: Callable[..., dict[str, Any]]
) -> None:
    run(launcher, mode, "deepspeed", tmp_path, on_one_machine)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["inline", "dedicated"])
def test_torchrun_with_fsdp2(mode: str, tmp_path: Path, on_one_machine: Callable[..., dict[str, Any]]) -> None:
    run(start_torchrun, mode, "fsdp2", tmp_path, on_one_machine)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("wirefilter") is None, reason="no wirefilter; apt-get install vde2")
def test_benchmark(tmp_path: Path) -> None:
    """That the cable can be made slow and fast again, and that steps of both phases are found."""
    script, record = Path(__file__).parents[1] / "examples" / "benchmarks" / "nodes.py", tmp_path / "record.json"
    command = [sys.executable, str(script), "--seconds", "8", "--pairs", "1", "--output", str(record)]
    subprocess.run(command, env=environment(tmp_path), check=True, timeout=280)
    fast, slow = json.loads(record.read_text())["rows"]
    assert (fast["slow"], slow["slow"]) == (False, True) and fast["steps"] and slow["steps"]
