"""Fields that stay the same between decisions are sent once, as long as every rank reports that it has them."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from replicated_ckpt.errors import PeerProtocolError

_KNOWS, _AS = "knows", "as"
STAYS = "stays"
"""The entry of a whole decision that names the fields of it that ranks are to keep."""
_LOST = "Save again: the coordinator then sends every rank the whole decision."


class CachedDecisions:
    """The cached fields of one rank in one process group: by topic, with the digest of the message that brought them.

    A message that refers to another one refers to a whole one. One call at a time.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, Mapping[str, Any]]] = {}

    def describe_known(self, topic: str) -> Mapping[str, str]:
        """The entry of a rank's post that names the message in its cache."""
        return {_KNOWS: self._kept[topic][0]} if topic in self._kept else {}

    def shorten(
        self, topic: str, fields: Mapping[str, Any], stays: Collection[str], posts: Sequence[Mapping[str, Any] | None]
    ) -> Mapping[str, Any] | None:
        """Coordinator: the decision without the fields that `stay`, if they are as before and all ranks have those."""
        digest, before = self._kept.get(topic, ("", {}))
        if before != {name: fields[name] for name in stays} or not before:
            return None
        # A rank that has just joined, or has missed a decision, has other fields or none: all get the whole decision.
        if not all(post is not None and post.get(_KNOWS) == digest for post in posts):
            return None
        return {**{name: value for name, value in fields.items() if name not in stays}, _AS: digest}

    def keep(self, topic: str, raw: bytes, fields: Mapping[str, Any], stays: Collection[str]) -> None:
        """Caches the fields that `stays` names, as the message `raw` brought them."""
        self._kept[topic] = hashlib.sha256(raw).hexdigest()[:32], {name: fields[name] for name in stays}

    def complete(self, topic: str, raw: bytes, fields: dict[str, Any]) -> dict[str, Any]:
        """A rank: the whole decision, from the fields of the message `raw` and the cache.

        Raises:
            PeerProtocolError: it refers to a message that this rank does not have, or `stays` names missing fields.
        """
        stays, digest = fields.pop(STAYS, None), fields.pop(_AS, None)
        if stays is not None:
            if not isinstance(stays, list) or not all(isinstance(name, str) and name in fields for name in stays):
                raise PeerProtocolError(f"The decision about this {topic} names unknown fields: {stays!r:.200}.")
            self.keep(topic, raw, fields, stays)
        if digest is not None:
            known, before = self._kept.get(topic, ("", {}))
            # Filled in from another decision, this rank would send its copies elsewhere than the other ranks expect.
            if digest != known:
                earlier = f"an earlier one, {digest!r:.80}, which this rank does not have"
                raise PeerProtocolError(f"The decision about this {topic} refers to {earlier}.", _LOST)
            fields = {**before, **fields}
        return fields
