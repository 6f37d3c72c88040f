"""Finds FashionMNIST: `python -m replicated_ckpt.drill.dataset --out DIR` writes it where all ranks can map it."""

import argparse
import gzip
import os
import shutil
import socket
import sys
from pathlib import Path

import torch

from replicated_ckpt.drill.errors import DatasetUnusable
from replicated_ckpt.drill.evidence import write_json
from replicated_ckpt.drill.workload import CLASSES, SIDE, Images

DEBIAN_DIR = Path("/usr/share/datasets/fashion-mnist")  # package dataset-fashion-mnist
FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
DOWNLOAD_LIMIT_S = 10.0  # without an answer from a mirror
MADE_UP_IMAGES = 2048


def fashion_mnist(data: Path | None, scratch: Path, *, debian_dir: Path = DEBIAN_DIR) -> Images:
    """FashionMNIST from `data` if given, else from Debian's package, else downloaded, else something made up.

    `scratch` is a folder for unpacked files. The `source` of what is returned says in one line what it is.

    Raises: DatasetUnusable when `data` is given and there is no FashionMNIST in it.
    """
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError, OSError) as exc:  # a wheel for another torch fails in all three ways
        if data is not None:
            raise DatasetUnusable(f"torchvision cannot be imported to read {data}: {exc}") from exc
        return _random_images("no torchvision beside this torch")
    root = _torchvision_root(data, scratch) if data else _torchvision_root(debian_dir, scratch)
    if root is None and data is not None:
        raise DatasetUnusable(f"There is no FashionMNIST in {data}.")
    if root is not None:
        return _real_images(datasets.FashionMNIST(root), f"FashionMNIST from {data or debian_dir}")
    try:
        socket.setdefaulttimeout(DOWNLOAD_LIMIT_S)
        return _real_images(datasets.FashionMNIST(_cache(), download=True), "FashionMNIST, downloaded")
    except (OSError, RuntimeError) as exc:  # no network; or all mirrors failed
        print(f"FashionMNIST cannot be downloaded: {exc}", file=sys.stderr)
        return _fake_images(datasets)


def _torchvision_root(given: Path, scratch: Path) -> Path | None:
    """A folder that torchvision accepts, made in `scratch` if `given` has the plain or gzipped files; else None."""
    for raw in (given / "FashionMNIST" / "raw", given / "raw", given):
        if all((raw / name).exists() or (raw / f"{name}.gz").exists() for name in FILES):
            break
    else:
        return None
    target = scratch / "FashionMNIST" / "raw"
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (raw / name).exists():
            shutil.copyfile(raw / name, target / name)
        else:
            with gzip.open(raw / f"{name}.gz") as packed, (target / name).open("wb") as plain:
                shutil.copyfileobj(packed, plain)
    return scratch


def _cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "replicated-ckpt" / "datasets"


def _real_images(dataset: "torch.utils.data.Dataset[object]", source: str) -> Images:
    pixels, labels = dataset.data, dataset.targets  # type: ignore[attr-defined]
    return Images(pixels, labels, source)


def _fake_images(datasets: object) -> Images:
    from torchvision.transforms.functional import pil_to_tensor

    fake = datasets.FakeData(MADE_UP_IMAGES, (1, SIDE, SIDE), CLASSES)  # type: ignore[attr-defined]
    pixels = torch.stack([pil_to_tensor(image)[0] for image, _ in fake])
    labels = torch.tensor([int(label) for _, label in fake])
    return Images(pixels, labels, "torchvision's FakeData (no FashionMNIST on disk, none to download)")


def _random_images(why: str) -> Images:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (MADE_UP_IMAGES, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    labels = torch.randint(CLASSES, (MADE_UP_IMAGES,), generator=generator)
    return Images(pixels, labels, f"seeded random images ({why})")


def main() -> int:
    """Write `images.pt` for the ranks, and `about.json` with the source and the number of GPUs, into --out."""
    parser = argparse.ArgumentParser(prog="python -m replicated_ckpt.drill.dataset", description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with FashionMNIST")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result; it is made")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        images = fashion_mnist(arguments.data, arguments.out)
    except DatasetUnusable as exc:
        print(exc)
        return 1
    images.save(arguments.out / "images.pt")
    write_json(arguments.out / "about.json", {"source": images.source, "gpus": torch.cuda.device_count()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
