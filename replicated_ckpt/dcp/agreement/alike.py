"""Checks that all ranks ask for the same save: a rank with ack="local" makes no copy in a save that promises two."""

import contextlib
import socket
from collections.abc import Mapping, Sequence

from replicated_ckpt.config import WriterConfig
from replicated_ckpt.dcp.c10d.group_pool import acquire_group, agree_on_all
from replicated_ckpt.errors import ConfigInvalid

_MAY_DIFFER = ("root", "domain", "direct_io", "checkpoint_id_from")
"""Arguments of a writer that are a rank's, or a node's, own. All others are the whole save's."""


def describe_wanted(config: WriterConfig) -> dict[str, str]:
    """The arguments of a rank's writer that apply to the whole save, as text; those with their default are left out."""
    return {
        name: repr(value)
        for name, value in vars(config).items()
        if name not in _MAY_DIFFER and value != getattr(WriterConfig, name, None)
    }


def check_ranks_alike(wanted: Mapping[str, str]) -> None:
    """Compares the arguments of all ranks, before any rank acts on its own. Every rank calls this.

    Raises:
        ConfigInvalid: as `check_wanted_alike`, on all ranks.
    """
    pooled = acquire_group()
    if pooled is None:
        return
    with contextlib.closing(pooled), pooled.use():
        told = agree_on_all(pooled.group, lambda: (wanted, socket.gethostname()))
    check_wanted_alike([wants for wants, _ in told], [host for _, host in told])


def check_wanted_alike(wants: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> None:
    """Compares the ranks' arguments, each as `describe_wanted` returns them, with the ranks' hosts for the error.

    Raises:
        ConfigInvalid: one was given another argument than rank 0.
    """
    # Each rank leaves its defaults out, so one rank's entry is enough to compare all of them.
    for name in dict.fromkeys(name for wanted in wants for name in wanted):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, wanted in enumerate(wants):
            ranks_by_value.setdefault(wanted.get(name, repr(getattr(WriterConfig, name, None))), []).append(rank)
        if len(ranks_by_value) > 1:
            told = (
                f"{value} on {'ranks' if ranks[1:] else 'rank'} {', '.join(map(str, ranks))} (host {hosts[ranks[0]]})"
                for value, ranks in ranks_by_value.items()
            )
            raise ConfigInvalid(
                f"The ranks ask for different saves: {name} is {'; '.join(told)}.",
                f"Pass the same {name} to ReplicatedWriter, or CheckpointManager, on every rank.",
            )
