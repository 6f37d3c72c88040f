"""The locks by which agents see that this rank still works on a save."""

import contextlib
import os
import weakref

from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.local.store import LocalStore


class HeldSave:
    """What a writer holds of its save, until it is closed or the writer is gone.

    Only the coordinator is told by DCP when a save has ended: the other ranks hold it until their next one.
    """

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        weakref.finalize(self, self._open.close)

    def hold(self, store: LocalStore, save_id: str) -> None:
        """Holds the save, once more if it is held already.

        Raises:
            SaveAborted: it is not open. StoreError
        """
        with translate_errors(str(store.root), "hold", save_id):
            self._open.callback(os.close, store.lock_save(save_id))

    def close(self) -> None:
        self._open.close()
