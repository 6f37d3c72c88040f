"""Tensors on a device: copied in pieces, on a stream of their own, into two pinned buffers that are written in turn."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

PIECE_BYTES = 4 << 20
_side_streams: dict[torch.device, "torch.cuda.Stream"] = {}


def copy_to_host(tensor: torch.Tensor, piece_bytes: int = PIECE_BYTES) -> Iterator[torch.Tensor]:
    """The bytes of a dense tensor on any device as they lie in memory, in pieces on the host.

    While one piece is used the next is being copied; each is valid until the one after it is asked for. There are never
    more than two of them on the host. What the current stream was told to do to the tensor before is done first.
    """
    data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    parts = [data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes)]
    kind: dict[str, Any] = {"dtype": torch.uint8, "device": "cpu", "pin_memory": data.is_cuda}
    places = [torch.empty(min(piece_bytes, len(data)), **kind) for _ in parts[:2]]
    under_way: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
    for number, part in enumerate(parts):
        under_way.append(_copying(part, places[number % 2][: len(part)]))
        if len(under_way) == 2:
            yield _wait_for_copy(*under_way.pop(0))
    for piece in under_way:
        yield _wait_for_copy(*piece)


def _copying(part: torch.Tensor, place: torch.Tensor) -> "tuple[torch.Tensor, torch.cuda.Event | None]":
    """Begins to copy; the event, where there is one, says when it is done."""
    with _side_stream(part):
        place.copy_(part, non_blocking=True)
        return place, torch.cuda.current_stream(part.device).record_event() if part.is_cuda else None


def _wait_for_copy(place: torch.Tensor, done: "torch.cuda.Event | None") -> torch.Tensor:
    if done is not None:
        done.synchronize()
    return place


def _side_stream(part: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """A stream that begins with what was asked for before it, and does not wait for what comes after."""
    if not part.is_cuda:
        return contextlib.nullcontext()
    side = _side_streams.get(part.device)
    if side is None:
        side = _side_streams[part.device] = torch.cuda.Stream(part.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(part.device))
    return torch.cuda.stream(side)
