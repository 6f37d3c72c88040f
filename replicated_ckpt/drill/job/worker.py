"""One rank of a drill's job, `worker.py JOB_JSON` under torchrun: trains, saves, loads and reports."""

import ctypes
import faulthandler
import hashlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.drill.evidence import (
    JobSpec,
    LoadFailure,
    LoadRecord,
    RankReport,
    SaveRecord,
    WaitRecord,
    write_digests,
)
from replicated_ckpt.drill.job.workload import Images, build, train_step
from replicated_ckpt.drill.plan import UPLOAD_LIMIT_S, checkpoint_id
from replicated_ckpt.errors import ReplicatedCkptError

COLLECTIVE_LIMIT_S = 60  # below the drill's time-out for surviving ranks


class Trainer:
    """Model, optimizer and step of one rank."""

    def __init__(self, spec: JobSpec, store: Path) -> None:
        self.spec = spec
        self.device = torch.device(f"cuda:{os.environ['RANK']}" if spec.device == "cuda" else "cpu")
        # Initial weights that differ from any saved ones: otherwise a load that does nothing would look like a success.
        self.model, self.optimizer = build(spec.width, seed=spec.seed + len(spec.loads), device=self.device)
        self.images = Images.load(Path(spec.data))
        bucket: dict[str, Any] = {"object_store": spec.object_store, "storage_options": spec.storage_options}
        self.writer = ReplicatedWriter(store, copies=spec.copies, **bucket)
        self.reader = ReplicatedReader(store, **bucket)
        self.results = Path(spec.results)
        self.step = 0
        self.loss_by_step: dict[int, float] = {}

    def state(self) -> dict[str, Any]:
        """The state dict for a save or load."""
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim, "step": self.step}

    def advance(self) -> None:
        """Trains one step."""
        images, labels = self.images.batch(self.step, global_batch=self.spec.global_batch, seed=self.spec.seed)
        loss = train_step(self.model, self.optimizer, images, labels)
        self.step += 1
        self.loss_by_step[self.step] = loss

    def save(self) -> SaveRecord:
        """Saves a checkpoint, and writes the digests of its tensors into the results."""
        name, state = checkpoint_id(self.step), self.state()
        self.record_digests(f"saved-{name}", state)
        started = time.perf_counter()
        dcp.save(state, checkpoint_id=name, storage_writer=self.writer)
        seconds = time.perf_counter() - started
        report = self.writer.last_save
        if report is None:
            raise RuntimeError("dcp.save returned, but the writer has no report of the save")
        return SaveRecord(name, self.step, seconds, report.shards, report.copies_made)

    def wait_for_save(self) -> WaitRecord:
        """Waits until every checkpoint of this rank's writer is in the object store."""
        started = time.perf_counter()
        return WaitRecord(self.writer.wait(UPLOAD_LIMIT_S), time.perf_counter() - started)

    def load(self, requested: str) -> LoadRecord:
        """Tries to load. After a success, model and optimizer are those of the checkpoint."""
        state = self.state()
        started = time.perf_counter()
        try:
            dcp.load(state, checkpoint_id=requested, storage_reader=self.reader)
        except (CheckpointException, ReplicatedCkptError) as exc:
            seconds = time.perf_counter() - started
            return LoadRecord(requested, seconds, raised=type(exc).__name__, failures=tuple(_failures(exc)))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        seconds = time.perf_counter() - started
        self.step = state["step"]
        report = self.reader.last_load
        if report is None:
            raise RuntimeError("dcp.load returned, but the reader has no report of the load")
        self.record_digests(f"loaded-{report.checkpoint_id}", state)
        return LoadRecord(
            requested,
            seconds,
            checkpoint_id=report.checkpoint_id,
            step=self.step,
            bytes_local=report.bytes_local,
            bytes_peer=report.bytes_peer,
            bytes_object=report.bytes_object,
            bytes_shared=report.bytes_shared,
            bad_copies=report.bad_copies,
        )

    def record_digests(self, moment: str, state: Mapping[str, Any]) -> None:
        """Writes the digest of every whole tensor. All ranks must call it, because it gathers sharded tensors."""
        digests: dict[str, str] = {}
        for fqn, tensor in _tensors("", state):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if dist.get_rank() == 0:
                digests[fqn] = _digest(whole)
        if dist.get_rank() == 0:
            write_digests(self.results, moment, digests)


def run(trainer: Trainer) -> None:
    """Does the work of the spec and reports. With `trains_on` it then trains until the process is killed."""
    spec = trainer.spec
    saves: list[SaveRecord] = []
    loads = [trainer.load(requested) for requested in spec.loads]
    if not loads or loads[-1].raised is None:
        while trainer.step < spec.end_step:
            trainer.advance()
            if trainer.step in spec.save_steps:
                saves.append(trainer.save())
        trainer.record_digests("end", trainer.state())
    wait = trainer.wait_for_save() if saves and spec.object_store else None
    RankReport(dist.get_rank(), tuple(saves), tuple(loads), trainer.loss_by_step, wait).write_report(trainer.results)
    # The drill kills nodes during training.
    while spec.trains_on:
        trainer.advance()


def _failures(exc: BaseException) -> Iterator[LoadFailure]:
    if isinstance(exc, CheckpointException):
        for rank, (cause, _) in exc.failures.items():
            yield LoadFailure(type(cause).__name__, str(cause), rank, tuple(getattr(cause, "shards", ())))
    else:
        yield LoadFailure(type(exc).__name__, str(exc), None, tuple(getattr(exc, "shards", ())))


def _tensors(prefix: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Fully qualified name and value of every tensor in `value`, in the same order on all ranks."""
    if isinstance(value, Mapping):
        for key in value:
            yield from _tensors(f"{prefix}.{key}" if prefix else str(key), value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(f"{prefix}.{index}", item)
    elif isinstance(value, Tensor):
        yield prefix, value


def _digest(tensor: Tensor) -> str:
    """A digest of dtype, shape and bytes: two digests are equal if and only if the tensors are equal bit for bit."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{plain.dtype} {tuple(plain.shape)} ".encode(), digest_size=16)
    digest.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))  # without numpy, which may be missing
    return digest.hexdigest()


def _watch(spec: JobSpec, rank: int) -> None:
    """Dumps all stacks on SIGUSR1. At the time limit dumps them and exits, so that no rank outlives a killed drill."""
    stacks = (Path(spec.results) / f"stacks-rank-{rank}.txt").open("w")  # stays open: the handlers write to it
    faulthandler.register(signal.SIGUSR1, file=stacks)
    faulthandler.dump_traceback_later(spec.limit_s, exit=True, file=stacks)


def main() -> None:
    """Joins the process group, runs the job, and destroys the group."""
    # A forked rank inherits torchrun's handler, which cannot run while torch waits in C: the rank would end 30 s later.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    spec = JobSpec.read_spec(Path(sys.argv[1]))
    _watch(spec, int(os.environ["RANK"]))
    # The number of threads changes the order of sums, and so the bits.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)  # the drill compares bits of different processes
    if spec.device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
    backend = "cpu:gloo,cuda:nccl" if spec.device == "cuda" else "cpu:gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_LIMIT_S))
    try:
        run(Trainer(spec, Path(os.environ["DRILL_STORE"])))
        # If a rank exits first, it closes connections that other ranks still use.
        dist.barrier()
    except BaseException:
        # Before destroy_process_group, which may hang: torchrun would then show no cause.
        (Path(spec.results) / f"error-rank-{dist.get_rank()}.txt").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
