"""Steps: ranks of one node load the same bytes, and one of them stalls while the others wait for what it fetches."""

import time
from typing import Any

from replicated_ckpt.dcp.sharing import OwnUnits
from replicated_ckpt.stores import spool
from tests.multiprocess.context import Context
from tests.multiprocess.steps_peers import load_pieces

PATIENCE_S = 1.0
STALL_S = 4.0


def load_while_one_stalls(context: Context, checkpoint_id: str, count: int, ranks: int, staller: int) -> dict[str, Any]:
    """Loads pieces; what rank `staller` fetches for others takes it longer than they wait."""
    fetched, patience_s = OwnUnits.fetched, spool.PATIENCE_S

    def stalled(self: OwnUnits, *args: Any) -> memoryview:
        time.sleep(STALL_S)
        return fetched(self, *args)

    spool.PATIENCE_S = PATIENCE_S
    if context.rank == staller:
        OwnUnits.fetched = stalled  # type: ignore[method-assign,assignment]
    started = time.monotonic()
    try:
        return load_pieces(context, checkpoint_id, count, ranks) | {"seconds": time.monotonic() - started}
    finally:
        OwnUnits.fetched = fetched  # type: ignore[method-assign]
        spool.PATIENCE_S = patience_s
