"""The store of a reader that was given no root: the bucket, or other nodes, have all that it loads."""

from replicated_ckpt.stores.local.store import LocalStore


class EmptyStore(LocalStore):
    """Nothing lies in it, and nothing can be put there: no directory can be made at its root."""

    def __init__(self) -> None:
        super().__init__("/proc/self/replicated-ckpt-nowhere")
