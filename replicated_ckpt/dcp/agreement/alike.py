"""What all ranks of one save must want alike: a rank with ack="local" would make no copy in a save that promises two."""

from collections.abc import Mapping, Sequence

from replicated_ckpt.config import WriterConfig
from replicated_ckpt.errors import ConfigInvalid

_MAY_DIFFER = ("root", "domain", "direct_io", "checkpoint_id_from")
"""Arguments of a writer that are a rank's, or a node's, own. All others are the whole save's."""


def describe_wanted(config: WriterConfig) -> dict[str, str]:
    """The arguments of a rank's writer that are the whole save's, in words."""
    return {name: repr(value) for name, value in vars(config).items() if name not in _MAY_DIFFER}


def check_wanted_alike(wants: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> None:
    """Of each rank what `describe_wanted` said, and its host.

    Raises:
        ConfigInvalid: one was given another argument than rank 0.
    """
    for name in wants[0]:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, wanted in enumerate(wants):
            ranks_by_value.setdefault(wanted[name], []).append(rank)
        if len(ranks_by_value) > 1:
            told = (
                f"{value} on {'ranks' if ranks[1:] else 'rank'} {', '.join(map(str, ranks))} (host {hosts[ranks[0]]})"
                for value, ranks in ranks_by_value.items()
            )
            raise ConfigInvalid(
                f"The ranks ask for different saves: {name} is {'; '.join(told)}.",
                f"Pass the same {name} to ReplicatedWriter, or CheckpointManager, on every rank.",
            )
