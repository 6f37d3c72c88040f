"""The other tools that are compared with ours and stock torch: names, promises, and installed versions."""

from dataclasses import dataclass

from benchmarks.machine import installed


@dataclass(frozen=True)
class Peer:
    """`way` is the name of the tool's adapter. `copies` is the number of its copies on nodes' disks or in their memory;
    ours makes as many.

    `recovers`: a node can be lost between its save and its load. `promise` is what its save has done on return, which
    is always less than ours. `acks` are the levels of our saves in the comparison.
    """

    way: str
    distribution: str
    copies: int
    recovers: bool
    promise: str
    acks: tuple[str, ...] = ("peer",)

    @property
    def version(self) -> str | None:
        return installed(self.distribution)


PEERS = (
    Peer("torchsnapshot", "torchsnapshot", 1, False, "1 copy, on a shared directory, no checksum, no fsync"),
    Peer("nvrx", "nvidia-resiliency-ext", 1, False, "1 copy, of each rank for itself, no fsync"),
    Peer("nvrx clique", "nvidia-resiliency-ext", 2, True, "2 copies, by gloo, no fsync", ("peer", "local")),
    Peer(
        "flashpoint",
        "ml-flashpoint",
        2,
        True,
        "own copy in memory, the partner's after the return, no checksum, no fsync",
        ("peer", "local"),
    ),
    Peer("lm-resiliency", "lm-resiliency", 2, False, "own copy with CRC-32 on disk, the partner's in its memory only"),
)
BUCKET_PEER = Peer("s3torchconnector", "s3torchconnector", 0, False, "in the bucket, no copy on nodes")
