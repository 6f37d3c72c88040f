"""What a save or load has failed with fits a line of a log: the cause, on which rank, and about which entry."""

from traceback import StackSummary

from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.dcp.runtime.failures import describe_failure
from replicated_ckpt.errors import SaveAborted, StoreFull


def test_the_cause_is_named_before_its_echoes() -> None:
    """And without tracebacks, which would fill the line."""
    full = StoreFull("/nvme/ckpt", "write", "step-1/__7_0.distcp", "OSError: No space left on device")
    full.add_note("Met on host n7.")
    failures = {rank: (SaveAborted("Rank 7 failed.\nIt was given up."), StackSummary()) for rank in range(7)}
    said = describe_failure(CheckpointException("save", {**failures, 7: (full, StackSummary())}))
    assert said.startswith(f"rank 7: StoreFull: {full} (Met on host n7); rank 0: SaveAborted: Rank 7 failed.?It was")
    assert said.endswith("; and 5 more ranks")


def test_an_error_that_is_no_dcp_s_is_itself() -> None:
    """With its class, as a message alone may not say what it is."""
    assert describe_failure(ValueError("no\nsuch")) == "ValueError: no?such"
