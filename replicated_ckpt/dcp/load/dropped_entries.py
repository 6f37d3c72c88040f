"""The entries of a checkpoint whose optimizer was dropped. A load that asks for one of them gets an error of this
package.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata

from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.parts import is_dropped
from replicated_ckpt.errors import OptimizerDropped


class EntriesLeft(dict[str, STORAGE_TYPES]):
    """The entries that are left, by name. Planners look names up here before they plan a read."""

    def __init__(self, left: Mapping[str, STORAGE_TYPES], dropped: tuple[str, ...], error: OptimizerDropped) -> None:
        super().__init__(left)
        self._dropped, self._error = frozenset(dropped), error

    def __contains__(self, name: object) -> bool:
        """Raises OptimizerDropped: the entry is missing, and its name belongs to the dropped optimizer."""
        if super().__contains__(name):
            return True
        if isinstance(name, str) and is_dropped(name, self._dropped):
            raise self._error
        return False

    def __missing__(self, name: str) -> STORAGE_TYPES:
        raise self._error if is_dropped(name, self._dropped) else KeyError(name)


def refuse_dropped(metadata: Metadata, manifest: Manifest, newest_full: str) -> Metadata:
    """The metadata. If the checkpoint's optimizer was dropped, each look-up of a dropped entry raises."""
    if not manifest.is_slim:
        return metadata
    error = OptimizerDropped(manifest.checkpoint_id, manifest.dropped, newest_full)
    return replace(metadata, state_dict_metadata=EntriesLeft(metadata.state_dict_metadata, manifest.dropped, error))
