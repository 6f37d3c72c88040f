"""What stays the same from one decision to the next is told once, as long as every rank says that it still has it."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from replicated_ckpt.errors import PeerProtocolError

_KNOWS, _AS = "knows", "as"
STAYS = "stays"
"""The entry of a whole decision that names the fields of it that ranks are to keep."""
_LOST = "Save again: ranks then say that they have nothing of an earlier decision, and are told all of it."


class CachedDecisions:
    """Of one rank in one process group: by topic the fields that stay, and the digest of the message that told them.

    A message that refers to another one refers to a whole one. One call at a time.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, Mapping[str, Any]]] = {}

    def describe_known(self, topic: str) -> Mapping[str, str]:
        """What a rank's post says of this."""
        return {_KNOWS: self._kept[topic][0]} if topic in self._kept else {}

    def shorten(
        self, topic: str, fields: Mapping[str, Any], stays: Collection[str], posts: Sequence[Mapping[str, Any] | None]
    ) -> Mapping[str, Any] | None:
        """Coordinator: the decision without the fields that `stay`, if they are as before and all ranks have those."""
        digest, before = self._kept.get(topic, ("", {}))
        if before != {name: fields[name] for name in stays} or not before:
            return None
        if not all(post is not None and post.get(_KNOWS) == digest for post in posts):
            return None
        return {**{name: value for name, value in fields.items() if name not in stays}, _AS: digest}

    def keep(self, topic: str, raw: bytes, fields: Mapping[str, Any], stays: Collection[str]) -> None:
        """This is what was told of them, in the message `raw`."""
        self._kept[topic] = hashlib.sha256(raw).hexdigest()[:32], {name: fields[name] for name in stays}

    def complete(self, topic: str, raw: bytes, fields: dict[str, Any]) -> dict[str, Any]:
        """A rank: the whole decision, of the message `raw` that has these fields.

        Raises:
            PeerProtocolError: it refers to what this rank does not have, or names fields that it has not.
        """
        stays, digest = fields.pop(STAYS, None), fields.pop(_AS, None)
        if stays is not None:
            if not isinstance(stays, list) or not all(isinstance(name, str) and name in fields for name in stays):
                raise PeerProtocolError(
                    f"The decision about this {topic} names fields that it has not: {stays!r:.200}."
                )
            self.keep(topic, raw, fields, stays)
        if digest is not None:
            known, before = self._kept.get(topic, ("", {}))
            if digest != known:
                what = f"The decision about this {topic} refers to an earlier one, {digest!r:.80}, which this rank has not."
                raise PeerProtocolError(what, _LOST)
            fields = {**before, **fields}
        return fields
