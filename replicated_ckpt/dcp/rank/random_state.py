"""The random generators of this process as plain values: Python's, numpy's, torch's on the CPU and on each CUDA device."""

import random
from typing import Any

import numpy as np
import torch


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
    """Sets what `capture_random` took. CUDA devices that this machine does not have are left out."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states.get("cuda", ())):
        if device < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)
