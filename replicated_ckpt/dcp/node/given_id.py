"""The checkpoint id that a program passes, as the name that it is under a root."""

import os

from replicated_ckpt.core.layout import checkpoint_id_under
from replicated_ckpt.environment import check_encodable


def id_under(root: str, given: str | os.PathLike[str]) -> str:
    """As `checkpoint_id_under`, of a name that this process can give to a directory.

    Raises:
        ConfigInvalid: it is no such name.
    """
    text = os.fspath(given)
    check_encodable("checkpoint_id", text)
    return checkpoint_id_under(root, text)
