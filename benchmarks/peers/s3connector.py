"""s3torchconnector: a DCP writer and reader for a bucket, without a node's disk."""

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed.checkpoint as dcp
from s3torchconnector import S3ClientConfig
from s3torchconnector._s3client import S3Client
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
from s3torchconnector.dcp.s3_file_system import S3FileSystem

from benchmarks.rank.state import State
from benchmarks.rank.ways import StockBucket

_REGION = "us-east-1"


class S3Connector(StockBucket):
    """The writer and reader take no endpoint, so they get a file system whose client has one."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        super().__init__(url, storage_options)
        os.environ["AWS_ACCESS_KEY_ID"] = storage_options[
            "key"
        ]  # the client reads credentials only from the environment
        os.environ["AWS_SECRET_ACCESS_KEY"] = storage_options["secret"]
        os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
        self._endpoint = storage_options["client_kwargs"]["endpoint_url"]

    def save(self, state: State, name: str) -> None:
        path = f"{self._url}/{name}/"
        dcp.save(state.values, storage_writer=self._reaching(S3StorageWriter(_REGION, path), path))

    def load(self, state: State, name: str) -> None:
        path = f"{self._url}/{name}/"
        dcp.load(state.values, storage_reader=self._reaching(S3StorageReader(_REGION, path), path))

    def _reaching(self, storage: Any, path: str) -> Any:
        config = S3ClientConfig(force_path_style=True)
        client = S3Client(_REGION, endpoint=self._endpoint, s3client_config=config)
        reader = getattr(storage, "_reader_constructor", None)
        storage.fs = S3FileSystem(_REGION, s3_client=client, reader_constructor=reader)
        storage.path = storage.fs.init_path(path)
        return storage
