"""The meaning of "latest": the newest checkpoint in one directory of ids, or of one form there, such as "step-{}"."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from replicated_ckpt.core.layout import LATEST
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.errors import LatestAmbiguous

_HERE = "./"


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint whose id lies in `directory`; "" for ids of one part; None: in the only existing directory.

    `form`: only ids whose last part is `form.format(step)` for some step, such as "step-{}". "": all ids.
    """

    directory: str | None = None
    form: str = ""

    def __str__(self) -> str:
        """The text that `parse` reads: "latest", "run-a/latest", or "./latest" for ids of one part."""
        prefix = "" if self.directory is None else f"{self.directory}/" if self.directory else _HERE
        return f"{prefix}{LATEST}{f' {self.form}' if self.form else ''}"

    @classmethod
    def parse(cls, asked: str) -> "Newest | None":
        """Parses a request. None: the text is a checkpoint id, which has no braces."""
        name, space, form = asked.rpartition(" ") if asked.endswith("}") else (asked, "", "")
        directory, slash, last = name.rpartition("/")
        if last != LATEST or (space and not form):
            return None
        return cls(("" if directory == "." else directory or slash) if slash else None, form)

    def describe_absence(self) -> str:
        if self.form:
            return f"No checkpoint named {self.form.partition('{')[0]}N"
        if self.directory is None:
            return "No checkpoint at all"
        return (
            f"No checkpoint in {self.directory + '/'!r}" if self.directory else "No checkpoint with an id of one part"
        )

    def fits(self, checkpoint_id: str) -> bool:
        if self.directory is not None and scope_of(checkpoint_id) != self.directory:
            return False
        return not self.form or is_of_form(self.form, checkpoint_id.rpartition("/")[2])

    def choose_directory(self, ids: Iterable[str]) -> "Newest":
        """The same request for the one directory of these ids. Raises LatestAmbiguous: they lie in several."""
        directories = sorted(set(map(scope_of, ids))) if self.directory is None else []
        if len(directories) > 1:
            raise LatestAmbiguous([str(Newest(directory)) for directory in directories])
        return replace(self, directory=directories[0]) if directories else self


def is_newest(asked: str) -> bool:
    return Newest.parse(asked) is not None


def is_of_form(form: str, name: str) -> bool:
    """Whether `name` is `form.format(number)` for a number from 0: "step-7" matches "step-{}", "step-07" does not."""
    digits = name.removeprefix(form.partition("{")[0])
    return digits.isdecimal() and form.format(int(digits)) == name
