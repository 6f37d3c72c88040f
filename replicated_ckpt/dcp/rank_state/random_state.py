"""The random generators of this process as plain values: Python's, numpy's, torch's on the CPU and on each CUDA device."""

import random
from operator import index
from typing import Any

import numpy as np
import torch

from replicated_ckpt.core.one_line import one_line
from replicated_ckpt.errors import ObjectCorrupt

_MT19937_WORDS, _PHILOX_WORDS = 624, 4


def capture_random() -> dict[str, Any]:
    """The states of all of them now. CUDA's are there if this process has used CUDA."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": (version, list(words), gauss),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random(states: dict[str, Any]) -> None:
    """Sets what `capture_random` took. CUDA devices that this machine does not have are left out.

    Raises:
        ObjectCorrupt: a generator does not take its state, which no `capture_random` made. Those before it are set.
    """
    try:
        version, words, gauss = states["python"]
        _check_positions(states["numpy"])
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        for device, state in enumerate(states.get("cuda", ())):
            if device < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, device)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as exc:
        detail = f"they are no states of generators: {type(exc).__name__}: {exc}"
        raise ObjectCorrupt("this checkpoint", "load", "the random states of this rank", one_line(detail, 300)) from exc


def _check_positions(state: dict[str, Any]) -> None:
    """Raises ValueError: numpy would read beyond a generator's words; it takes any position that a state says.

    Source: numpy 2.3, _mt19937.pyx and _philox.pyx.
    """
    position, buffered = state["state"].get("pos", 0), state.get("buffer_pos", 0)
    if not (0 <= index(position) <= _MT19937_WORDS and 0 <= index(buffered) <= _PHILOX_WORDS):
        raise ValueError(f"a generator of numpy cannot stand at position {position}, {buffered}")
