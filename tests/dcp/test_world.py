"""The world of a save or load, as one process sees it."""

import os

from replicated_ckpt.dcp.world import World


def test_a_forked_process_is_a_session_of_its_own() -> None:
    """A trainer that forks its ranks after the import: no rank may take another's saves for its own earlier ones."""
    world = World(0, 1, None)
    here = world.session
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, world.session.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        there = answer.read()
    os.waitpid(pid, 0)
    assert there.endswith("/alone")
    assert there != here == world.session
