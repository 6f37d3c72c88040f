"""The state that a save of the torture writes. Its tensors identify the attempt, and are a function of its number."""

import torch

State = dict[str, torch.Tensor]


def contents(attempt: int, ranks: int) -> State:
    """The state of one attempt: two tensors for each rank, computed from the numbers of the attempt and the rank."""
    state = {"attempt": torch.tensor([attempt, ranks])}
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(1000 * attempt + rank)
        state[f"rank{rank}"] = torch.randint(0, 1 << 30, (150 + 40 * rank,), generator=generator)
        state[f"small{rank}"] = torch.full((3,), attempt * 100 + rank)
    return state


def part_of(state: State, rank: int) -> State:
    """The part of the state that one rank passes to `dcp.save`."""
    return {name: value for name, value in state.items() if name in ("attempt", f"rank{rank}", f"small{rank}")}
