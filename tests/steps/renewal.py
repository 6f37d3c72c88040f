"""Steps: the certificate of all nodes of a running job is renewed."""

import time
from pathlib import Path

import torch.distributed as dist

from replicated_ckpt.agent.state.endpoint import read_endpoint
from tests.steps.context import Context


def renew(context: Context, secret: str, before: str, within_s: float) -> str:
    """Renews the certificate as kubelet does, and waits until every node's agent serves another one. Returns this
    node's.
    """
    if context.rank == 0:
        Path(secret, "..new").rename(Path(secret, "..data"))
    deadline = time.monotonic() + within_s
    while (found := read_endpoint(context.root / ".agent")) is None or found.tls_sha256 == before:
        assert time.monotonic() < deadline, f"no other certificate: {found!r}"
        time.sleep(0.05)
    dist.barrier()
    return found.tls_sha256
