"""Failure domains: what a node fails together with."""

from collections.abc import Iterable, Sequence
from operator import eq


def list_domains(domain: str | None, boot_id: str, host: str) -> tuple[str, ...]:
    """What a node fails together with, the largest first: its domain as the user names it, its machine, its container.

    Containers have a host name each, and share the boot id of their machine. Without a named domain it is the machine.
    """
    machine = boot_id or host
    return domain or machine, machine, f"{machine}/{host}"


def find_shared(domains: Sequence[str], taken: Iterable[Sequence[str]]) -> tuple[bool, ...]:
    """Which domains a node shares with one of those `taken`, the largest first: the least tuple is the best place."""
    shared = (tuple(map(eq, domains, others)) for others in taken)
    return max(shared, default=())
