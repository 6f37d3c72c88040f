"""Errors of a drill itself. A scenario that did not hold is a verdict, not an error."""

from replicated_ckpt.errors import ReplicatedCkptError


class DrillError(ReplicatedCkptError):
    """The drill could not do what it planned, so the scenarios that depend on it did not hold."""

    default_hint = "Run it again with --keep and read the logs in the work directory."

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.message = message  # it quotes logs of the drill's own processes, line by line


class MotoFailed(DrillError):
    """The embedded object store did not start."""

    default_hint = "Try `pip install 'moto[server]'`, or name a bucket: --object-store s3://bucket/prefix."


class DatasetUnusable(DrillError):
    """The training data asked for cannot be read."""

    default_hint = (
        "Point --data at a folder with FashionMNIST/raw/ or with FashionMNIST's four idx files, gzipped or not."
    )
