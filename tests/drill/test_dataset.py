"""The source of the drill's images."""

import gzip
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from replicated_ckpt.drill.job.dataset import IMAGES_FILE, LABELS_FILE, fashion_mnist
from replicated_ckpt.drill.plan import DatasetUnusable

IMAGES = 3


@pytest.fixture(autouse=True)
def no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """No torchvision is installed."""
    monkeypatch.setitem(sys.modules, "torchvision", None)


def idx_files(folder: Path, *, packed: bool) -> Path:
    """A small FashionMNIST: all pixels of image i are i, and so is its label."""
    folder.mkdir(parents=True)
    for name in (IMAGES_FILE, LABELS_FILE):
        body = struct.pack(">II", 0x801, IMAGES) + bytes(range(IMAGES))
        if "images" in name:
            pixels = b"".join(bytes([number]) * 28 * 28 for number in range(IMAGES))
            body = struct.pack(">IIII", 0x803, IMAGES, 28, 28) + pixels
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(body))
        else:
            (folder / name).write_bytes(body)
    return folder


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("below", ["", "FashionMNIST/raw"])
def test_given_files_are_used(tmp_path: Path, *, packed: bool, below: str) -> None:
    """--data accepts torchvision's layout and a plain folder, gzipped or not, without torchvision."""
    idx_files(tmp_path / "data" / below, packed=packed)
    images = fashion_mnist(tmp_path / "data")
    assert images.labels.tolist() == [0, 1, 2]
    assert torch.equal(images.pixels[2], torch.full((28, 28), 2, dtype=torch.uint8))
    assert str(tmp_path / "data") in images.source


def test_a_folder_without_the_files_is_an_error(tmp_path: Path) -> None:
    """A folder that the user named is never replaced by other data."""
    with pytest.raises(DatasetUnusable, match="no FashionMNIST"):
        fashion_mnist(tmp_path)


@pytest.mark.parametrize(
    ("packed", "keep"),
    [(True, 0), (True, 7), (True, -1), (False, 0), (False, 7), (False, 4 * 4 + 28 * 28), (False, -1)],
)
def test_a_truncated_file_is_an_error(tmp_path: Path, *, packed: bool, keep: int) -> None:
    """A truncated download is an error without a traceback."""
    file = idx_files(tmp_path / "data", packed=packed) / f"{IMAGES_FILE}{'.gz' if packed else ''}"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DatasetUnusable, match=IMAGES_FILE):
        fashion_mnist(tmp_path / "data")


def test_images_without_as_many_labels_are_an_error(tmp_path: Path) -> None:
    """Images and labels of different counts are refused."""
    data = idx_files(tmp_path / "data", packed=False)
    (data / LABELS_FILE).write_bytes(struct.pack(">II", 0x801, 2) + bytes(2))
    with pytest.raises(DatasetUnusable, match="3 images and 2 labels"):
        fashion_mnist(data)


def test_without_any_source_the_images_are_random(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without files and torchvision, the drill uses seeded random images, and prints so."""
    images = fashion_mnist(None, debian_dir=tmp_path / "nothing")
    assert images.pixels.shape[1:] == (28, 28)
    assert len(images.labels) == len(images.pixels)
    assert "random images" in images.source
    assert "cannot be downloaded" in capsys.readouterr().err


def test_torchvision_downloads_where_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchvision that fits downloads the data."""
    monkeypatch.delitem(sys.modules, "torchvision")
    datasets = pytest.importorskip("torchvision.datasets", exc_type=ImportError)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def download(dataset: Any) -> None:
        folder = idx_files(Path(dataset.raw_folder), packed=False)
        for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
            (folder / name).touch()  # torchvision requires these files, too

    monkeypatch.setattr(datasets.FashionMNIST, "download", download)
    monkeypatch.setattr(datasets.FashionMNIST, "_load_data", lambda _: (torch.zeros(1), torch.zeros(1)))
    images = fashion_mnist(None, debian_dir=tmp_path / "nothing")
    assert images.labels.tolist() == [0, 1, 2]
    assert images.source == "FashionMNIST, downloaded"
