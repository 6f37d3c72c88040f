"""Who is compared with us, other than stock torch: what they are called, what they promise, and whether they are here."""

from dataclasses import dataclass

from benchmarks.machine import installed


@dataclass(frozen=True)
class Peer:
    """`way` is its adapter's name; `copies` on nodes' disks or in their memory, which ours is given as many of.

    `recovers`: a node can be lost between its save and its load. `promise` is what a save by it has done when it
    returns, which is less than ours in each case. `acks` are the levels at which ours saves in the comparison.
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
