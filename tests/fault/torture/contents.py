"""What a save of the torture holds: tensors that tell of which attempt they are, and follow from it bit by bit."""

import torch

State = dict[str, torch.Tensor]


def contents(attempt: int, ranks: int) -> State:
    """What attempt number so-and-so saves: of each rank two tensors, a function of both numbers."""
    state = {"attempt": torch.tensor([attempt, ranks])}
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(1000 * attempt + rank)
        state[f"rank{rank}"] = torch.randint(0, 1 << 30, (150 + 40 * rank,), generator=generator)
        state[f"small{rank}"] = torch.full((3,), attempt * 100 + rank)
    return state


def part_of(state: State, rank: int) -> State:
    """What one rank hands to `dcp.save`."""
    return {name: value for name, value in state.items() if name in ("attempt", f"rank{rank}", f"small{rank}")}
