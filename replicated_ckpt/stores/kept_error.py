"""An error that is kept: a traceback holds frames, and each of these what it worked on."""

from traceback import clear_frames


def forget_locals(error: BaseException) -> BaseException:
    """The error, for those who ask for it later: it says where it was raised, and holds nothing that was in use there."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            clear_frames(each.__traceback__)
            waiting += [each.__cause__, each.__context__]
    return error
