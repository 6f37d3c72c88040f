"""Calling back: the user's function that wants to know how a save or load went."""

import logging
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

log = logging.getLogger(__name__)


def call_back(function: Callable[[Any], object] | None, report: object) -> None:
    """Calls the user's function. What it raises is logged: the save or load has succeeded all the same."""
    if function is None:
        return
    try:
        function(report)
    except (Exception, CheckpointException):  # DCP's own is no Exception
        log.exception("%r raised; the save or load that it was told of is not affected", function)
