"""Finds FashionMNIST: `python -m replicated_ckpt.drill.job.dataset --out DIR` writes it into a file that ranks map."""

import argparse
import gzip
import math
import os
import socket
import struct
import sys
import zlib
from pathlib import Path

import torch

from replicated_ckpt.drill.evidence import write_json
from replicated_ckpt.drill.job.workload import CLASSES, SIDE, Images
from replicated_ckpt.drill.plan import DatasetUnusable

DEBIAN_DIR = Path("/usr/share/datasets/fashion-mnist")  # package dataset-fashion-mnist
IMAGES_FILE, LABELS_FILE = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
DOWNLOAD_LIMIT_S = 10.0  # without a byte from a mirror
MADE_UP_IMAGES = 2048


def fashion_mnist(data: Path | None, *, debian_dir: Path = DEBIAN_DIR) -> Images:
    """FashionMNIST from `data` if given, else from Debian's package, else downloaded by torchvision, else random images.

    Reading needs no torchvision.

    Raises:
        DatasetUnusable: there is no FashionMNIST in `data`, or a file is damaged.
    """
    folder = _folder_of_files(data or debian_dir)
    if folder is not None:
        return _read_images(folder, f"FashionMNIST from {data or debian_dir}")
    if data is not None:
        raise DatasetUnusable(f"There is no FashionMNIST in {data}.")
    try:
        folder = _download()
    except (ImportError, OSError, RuntimeError) as exc:  # torchvision for another torch, or a failed download
        print(f"FashionMNIST cannot be downloaded: {exc}", file=sys.stderr)
        return _random_images("no FashionMNIST on disk, none to download")
    return _read_images(folder, "FashionMNIST, downloaded")


def _folder_of_files(given: Path) -> Path | None:
    """The folder below `given` with the training files, plain or gzipped; None if there is none."""
    for folder in (given / "FashionMNIST" / "raw", given / "raw", given):
        if all((folder / name).exists() or (folder / f"{name}.gz").exists() for name in (IMAGES_FILE, LABELS_FILE)):
            return folder
    return None


def _read_images(folder: Path, source: str) -> Images:
    pixels = _read_idx(folder, IMAGES_FILE, (SIDE, SIDE))
    labels = _read_idx(folder, LABELS_FILE, ())
    if len(pixels) != len(labels):
        raise DatasetUnusable(f"{folder}: {len(pixels)} images and {len(labels)} labels.")
    return Images(pixels, labels.long(), source)


def _read_idx(folder: Path, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """One file of unsigned bytes: [count, *shape] uint8. Its header is 0x08, the number of dimensions, and each of them."""
    path = folder / name
    try:
        body = path.read_bytes() if path.exists() else gzip.decompress((folder / f"{name}.gz").read_bytes())
    except (OSError, EOFError, zlib.error) as exc:
        raise DatasetUnusable(f"{path} cannot be read: {exc}") from exc
    header = 4 + 4 * (1 + len(shape))
    # A truncated or foreign file must give an error with its path.
    if len(body) >= header:
        magic, count, *sides = struct.unpack(f">{header // 4}I", body[:header])
        if magic == 0x800 + 1 + len(shape) and tuple(sides) == shape and len(body) - header == count * math.prod(shape):
            return torch.frombuffer(bytearray(body[header:]), dtype=torch.uint8).reshape(count, *shape)
    raise DatasetUnusable(f"{path} is not a complete file of FashionMNIST.")


def _download() -> Path:
    """Downloads by torchvision into this user's cache, and returns the folder."""
    from torchvision import datasets

    before = socket.getdefaulttimeout()
    # torchvision sets no time-out: a hung mirror would hang the drill.
    socket.setdefaulttimeout(DOWNLOAD_LIMIT_S)
    try:
        datasets.FashionMNIST(_cache(), download=True)
    finally:
        socket.setdefaulttimeout(before)
    return _cache() / "FashionMNIST" / "raw"


def _cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "replicated-ckpt" / "datasets"


def _random_images(why: str) -> Images:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (MADE_UP_IMAGES, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    labels = torch.randint(CLASSES, (MADE_UP_IMAGES,), generator=generator)
    return Images(pixels, labels, f"seeded random images ({why})")


def main() -> int:
    """Writes `images.pt` for the ranks, and `about.json` with the source and the number of GPUs, into --out."""
    parser = argparse.ArgumentParser(prog="python -m replicated_ckpt.drill.job.dataset", description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with FashionMNIST")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result; created if missing")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        images = fashion_mnist(arguments.data)
    except DatasetUnusable as exc:
        print(exc)
        return 1
    images.save(arguments.out / "images.pt")
    write_json(arguments.out / "about.json", {"source": images.source, "gpus": torch.cuda.device_count()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
