"""A site: nodes with real agents, a bucket, and injected faults between them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.s3 import S3Client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.peer.client import AgentClient
from tests.agent.agents import wait_for
from tests.buckets.faulty_bucket import FaultyBucket
from tests.buckets.servers import Server
from tests.harness.cluster import Call, Cluster, call
from tests.steps import objects

PREFIX = "runs/one"


@dataclass(frozen=True)
class Site:
    """Nodes that reach `server` only through `faulty`. The test itself reaches `server` directly."""

    cluster: Cluster
    server: Server
    faulty: FaultyBucket
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}/{PREFIX}"

    @property
    def where(self) -> dict[str, Any]:
        """Arguments of writers and readers that name the bucket behind `faulty`."""
        return {"object_store": self.url, "storage_options": self.faulty.storage_options()}

    @cached_property
    def bucket(self) -> Bucket:
        return Bucket(S3Client(ObjectTarget.check_supported(self.url, self.server.storage_options())))

    # Steps -------------------------------------------------------------------------------------------------------

    def save(self, checkpoint_id: str, count: int, **more: Any) -> Call[Any]:
        return call(objects.save, checkpoint_id=checkpoint_id, count=count, where=self.where, **more)

    def wait(self, **more: Any) -> Call[Any]:
        return call(objects.wait, where=self.where, **more)

    def failing_wait(self, timeout_s: float, **more: Any) -> Call[Any]:
        return call(objects.wait_fails, where=self.where, timeout_s=timeout_s, **more)

    def load(self, checkpoint_id: str, count: int, ranks: int, **more: Any) -> Call[Any]:
        return call(objects.load, checkpoint_id=checkpoint_id, count=count, ranks=ranks, where=self.where, **more)

    # What the test does and observes -----------------------------------------------------------------------------

    def lose_all(self) -> None:
        """Loses every node with its agent and its store."""
        for node in self.cluster.nodes:
            node.lose()

    def key(self, checkpoint_id: str, name: str) -> str:
        """The key of a checkpoint's object in the bucket."""
        return f"{PREFIX}/{checkpoint_id}/{name}"

    def body(self, key: str) -> bytes:
        raw: bytes = self.server.client().get_object(Bucket=self.name, Key=key)["Body"].read()
        return raw

    def change(self, key: str, body: bytes) -> None:
        self.server.client().put_object(Bucket=self.name, Key=key, Body=body)

    def asked(self, node: int, path: str) -> bytes:
        """The answer of a node's agent to a GET."""
        endpoint = read_endpoint(self.cluster.nodes[node].disk / ".agent")
        assert endpoint is not None, f"node {node} has no agent"
        with AgentClient(endpoint.local_address()) as client:
            return client.fetch("GET", path)

    def uploads(self, node: int) -> Mapping[str, Any]:
        """The uploads in the status of a node's agent."""
        found: Mapping[str, Any] = json.loads(self.asked(node, "/v1/status"))["object_store"]
        return found

    def wait_until_committed(self, checkpoint_id: str, within_s: float = 60.0) -> None:
        """Waits for the commit in the bucket. Asks no agent."""
        wait_for(lambda: self.bucket.save_of(checkpoint_id), within_s, f"{checkpoint_id} in {self.url}")
