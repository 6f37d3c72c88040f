"""The part size of uploads, an option of the agent."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedWriter
from replicated_ckpt.config import AgentConfig
from replicated_ckpt.errors import ConfigInvalid
from tests.buckets.servers import Server


@pytest.mark.fault
def test_parts_have_the_size_that_the_agent_was_given(
    moto: Server, where: dict[str, Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parts of 5 MiB, a shard of 11 MiB is uploaded in three parts."""
    monkeypatch.setenv("REPLICATED_CKPT_AGENT_UPLOAD_PART_MIB", "5")
    writer = ReplicatedWriter(root, copies=1, **where)
    dcp.save({"x": torch.ones(11 << 18)}, checkpoint_id="step-1", storage_writer=writer)
    writer.wait(ack="object")
    bucket, _, prefix = where["object_store"].removeprefix("s3://").partition("/")
    found = moto.client().head_object(Bucket=bucket, Key=f"{prefix}/step-1/__0_0.distcp")
    assert found["ETag"].endswith('-3"')


@pytest.mark.parametrize("size", [4, 513])
def test_parts_that_a_store_or_the_memory_refuses_are_invalid(tmp_path: Path, size: int) -> None:
    """The error of a part size out of bounds names the option, its variable and its bounds."""
    with pytest.raises(ConfigInvalid, match=r"upload_part_mib \(or .*_UPLOAD_PART_MIB\) must be 5 to 512, not"):
        AgentConfig(root=str(tmp_path), upload_part_mib=size)
