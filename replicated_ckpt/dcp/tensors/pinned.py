"""Copies to a GPU through pinned memory: two small buffers, each filled while the other one is on its way."""

import torch

BUFFER_BYTES = 4 << 20
_BUFFERS = 2


class PinnedRing:
    """Pinned buffers of one GPU and the stream that empties them. One thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [
            torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(_BUFFERS)
        ]
        self._events = [torch.cuda.Event() for _ in range(_BUFFERS)]  # type: ignore[no-untyped-call]
        self._next = 0

    def copy(self, piece: torch.Tensor, target: torch.Tensor) -> None:
        """Has the bytes `piece` (on the CPU) copied to `target` on the GPU; they may change once this returns."""
        done = 0
        while done < piece.numel():
            buffer, event = self._buffers[self._next], self._events[self._next]
            self._next = (self._next + 1) % _BUFFERS
            event.synchronize()
            count = min(BUFFER_BYTES, piece.numel() - done)
            buffer[:count].copy_(piece[done : done + count])
            with torch.cuda.stream(self.stream):
                target[done : done + count].copy_(buffer[:count], non_blocking=True)
                event.record(self.stream)
            done += count


_rings: dict[torch.device, PinnedRing] = {}


class PinnedCopies:
    """A contiguous target on a GPU. What the GPU's current stream does next comes after the copies."""

    def __init__(self, target: torch.Tensor) -> None:
        self._bytes = target.reshape(-1).view(torch.uint8)
        if target.device not in _rings:
            _rings[target.device] = PinnedRing(target.device)
        self._ring = _rings[target.device]
        self._ring.stream.wait_stream(torch.cuda.current_stream(target.device))
        self._position = 0

    def put(self, piece: memoryview) -> None:
        source = torch.frombuffer(piece, dtype=torch.uint8)
        self._ring.copy(source, self._bytes[self._position : self._position + len(piece)])
        self._position += len(piece)

    def close(self) -> None:
        torch.cuda.current_stream(self._bytes.device).wait_stream(self._ring.stream)
        self._bytes.record_stream(self._ring.stream)
