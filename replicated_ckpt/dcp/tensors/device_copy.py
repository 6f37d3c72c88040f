"""Copies tensors from a device to the host on a stream of their own: in pieces by pinned buffers, or to given memory."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

PIECE_BYTES = 4 << 20
_side_streams: dict[torch.device, "torch.cuda.Stream"] = {}


def copy_to_host(tensor: torch.Tensor, piece_bytes: int = PIECE_BYTES) -> Iterator[torch.Tensor]:
    """The bytes of a dense tensor on any device as they lie in memory, in pieces on the host.

    While one piece is used the next is being copied; each is valid until the next one is asked for. At most two of them
    are on the host. Earlier work of the current stream on the tensor is done first.
    """
    data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    parts = [data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes)]
    kind: dict[str, Any] = {"dtype": torch.uint8, "device": "cpu", "pin_memory": data.is_cuda}
    places = [torch.empty(min(piece_bytes, len(data)), **kind) for _ in parts[:2]]
    under_way: list[tuple[torch.Tensor, DeviceCopies]] = []
    for number, part in enumerate(parts):
        place = places[number % 2][: len(part)]
        under_way.append((place, DeviceCopies([(place, part)])))
        if len(under_way) == 2:
            yield _wait_for_copy(*under_way.pop(0))
    for piece in under_way:
        yield _wait_for_copy(*piece)


class DeviceCopies:
    """Copies of tensors to the host: those on the CPU are made with this object, those of GPUs go on by themselves.

    A GPU begins once its current stream has done its earlier work. The sources are kept until `wait_for_copies`.
    """

    def __init__(self, targets_and_sources: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        # Kept until the copies end: the caching allocator could give a freed source to the next tensor.
        self._sources = [source for _, source in targets_and_sources if source.is_cuda]
        self._ends: dict[torch.device, torch.cuda.Event] = {}
        for device in {source.device for source in self._sources}:
            side = _side_stream(device)
            with torch.cuda.stream(side):
                for target, source in targets_and_sources:
                    if source.device == device:
                        target.copy_(source, non_blocking=True)
            self._ends[device] = side.record_event()
        for target, source in targets_and_sources:
            # After the GPUs' copies are queued: both go on at the same time.
            if not source.is_cuda:
                target.copy_(source)

    def hold_streams(self) -> None:
        """Work queued on GPUs' current streams from here on waits for the copies. This call does not wait."""
        for device, end in self._ends.items():
            torch.cuda.current_stream(device).wait_event(end)

    def wait_for_copies(self) -> None:
        """Returns once everything is copied. Raises RuntimeError, of CUDA: then the copied bytes are undefined."""
        for end in self._ends.values():
            end.synchronize()
        self._sources.clear()


def _wait_for_copy(place: torch.Tensor, copies: DeviceCopies) -> torch.Tensor:
    copies.wait_for_copies()
    return place


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that runs after all work of the current one so far, and that later work does not wait for."""
    side = _side_streams.get(device)
    if side is None:
        side = _side_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    return side
