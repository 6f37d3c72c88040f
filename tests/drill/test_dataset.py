"""Where the drill's images come from."""

import gzip
import struct
from pathlib import Path

import pytest
import torch

from replicated_ckpt.drill.dataset import FILES, fashion_mnist
from replicated_ckpt.drill.errors import DatasetUnusable

pytest.importorskip("torchvision", reason="torchvision is not installed beside this torch", exc_type=ImportError)
IMAGES = 3


def idx_files(folder: Path, *, packed: bool) -> Path:
    """FashionMNIST in small: image i is all i, label i is i."""
    folder.mkdir(parents=True)
    for name in FILES:
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
    """--data takes torchvision's layout and a plain folder, gzipped or not."""
    idx_files(tmp_path / "data" / below, packed=packed)
    images = fashion_mnist(tmp_path / "data", tmp_path / "scratch")
    assert images.labels.tolist() == [0, 1, 2]
    assert torch.equal(images.pixels[2], torch.full((28, 28), 2, dtype=torch.uint8))
    assert str(tmp_path / "data") in images.source


def test_a_folder_without_the_files_is_an_error(tmp_path: Path) -> None:
    """What was asked for is never replaced in silence."""
    with pytest.raises(DatasetUnusable, match="no FashionMNIST"):
        fashion_mnist(tmp_path, tmp_path / "scratch")


def test_without_any_source_the_data_is_made_up_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No files, no network: FakeData, in one line."""
    from torchvision import datasets

    def no_network(*_args: object, **_keywords: object) -> None:
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    monkeypatch.setattr(datasets.FashionMNIST, "download", no_network)
    images = fashion_mnist(None, tmp_path, debian_dir=tmp_path / "nothing")
    assert images.pixels.shape[1:] == (28, 28)
    assert len(images.labels) == len(images.pixels)
    assert "FakeData" in images.source
    assert "cannot be downloaded" in capsys.readouterr().err
