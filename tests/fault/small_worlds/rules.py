"""The rules of a small world: the package's rules, and an old set of rules that loses acknowledged checkpoints."""

from functools import cache

from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.protocol.settlement import Answer, Fate, may_be_dropped, may_publish, settle_staged
from tests.fault.small_worlds.mending import ONE_RUN, SEQUENCES, Runs, save_id


def version(number: int, runs: Runs) -> Version:
    return Version(runs[number], SEQUENCES[number], float(number + 1), save_id(number))


@cache
def _settle(own: int, count: int, is_worked_on: bool, answers: tuple[tuple[int, Answer], ...]) -> Fate:
    settlement = settle_staged(
        own=f"n{own}",
        nodes=tuple(f"n{node}" for node in range(count)),
        coordinator="n0",
        is_worked_on=is_worked_on,
        answers={f"n{node}": answer for node, answer in answers},
    )
    return settlement.fate


@cache
def _may_publish(number: int, published: int | None, runs: Runs, is_opened: bool) -> bool:
    replaces = save_id(0) if is_opened and number == 1 else ""
    return may_publish(version(number, runs), None if published is None else version(published, runs), replaces)


@cache
def _may_drop(old: int, whole: frozenset[int], published: int | None, runs: Runs) -> bool:
    named = None if published is None else version(published, runs)
    return may_be_dropped(version(old, runs), whole=[version(number, runs) for number in whole], published=named)


class PackageRules:
    """The functions of `replicated_ckpt.core.protocol.settlement` that agents call. `runs`: the run of each version."""

    def __init__(self, runs: Runs = ONE_RUN) -> None:
        self.runs = runs

    def settle(self, own: int, count: int, *, is_worked_on: bool, answers: dict[int, Answer]) -> Fate:
        return _settle(own, count, is_worked_on, tuple(sorted(answers.items())))

    def may_publish(self, version: int, published: int | None, *, is_opened: bool) -> bool:
        return _may_publish(version, published, self.runs, is_opened)

    def keeps_replaced(self) -> bool:
        return True

    def may_drop(self, old: int, whole: frozenset[int], published: int | None) -> bool:
        return _may_drop(old, whole, published, self.runs)

    def aborts_when_asked(self) -> bool:
        return True


class OldRules(PackageRules):
    """The rules of commit adcd94a: a node that does not answer counts as not having published, and the last node to
    publish wins the name.
    """

    def settle(self, own: int, count: int, *, is_worked_on: bool, answers: dict[int, Answer]) -> Fate:
        del own, count
        if Answer.PUBLISHED in answers.values():
            return Fate.COMPLETE
        return Fate.IN_DOUBT if is_worked_on else Fate.DROP

    def may_publish(self, version: int, published: int | None, *, is_opened: bool) -> bool:
        del version, published, is_opened
        return True

    def keeps_replaced(self) -> bool:
        return False

    def aborts_when_asked(self) -> bool:
        return False
