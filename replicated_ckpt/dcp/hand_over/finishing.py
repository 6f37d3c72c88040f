"""The coordinator's hand-over: this node's agent makes the decision once all agents have written what they were given."""

import json
import logging
import time
from collections.abc import Callable

from replicated_ckpt import failpoints
from replicated_ckpt.agent.saves.finish import Finished, Outline
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.errors import ObjectMissing, ReplicatedCkptError, StoreUnavailable
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentClient

log = logging.getLogger(__name__)

_TRIES = 3
_PAUSE_S = 0.3
LOG_HINT = "Look at ROOT/.agent/log for what became of the agent; then save again."


class AgentSilent(StoreUnavailable):
    """This node's agent was asked to end the save and answers no more: the save may be committed by it, or not."""

    default_hint = (
        "The next save or load settles it. On rank 0's node `replicated-ckpt status --root ROOT` says whether the agent is "
        "stopped, and ROOT/.agent/log what became of it."
    )


def finish_by_agent(store: LocalStore, outline: Outline, start_agent: Callable[[], object]) -> Finished:
    """Has this node's agent end the save, and waits for it. One that dies is started again, and told again.

    Raises:
        AgentSilent: it does not answer any more, or is not reached again. Others: it has given the save up, or refused it.
    """
    body = json.dumps(outline.to_json()).encode()
    for tries_left in reversed(range(_TRIES)):
        try:
            return _finish(store, outline.manifest.save_id, body)
        except AgentSilent:
            raise
        except (StoreUnavailable, ObjectMissing) as exc:  # not known any more: it was started again
            if tries_left == 0:
                raise AgentSilent("this node's agent", "finish", outline.manifest.save_id, exc.message) from exc
            log.warning("this node's agent is asked again to finish the save: %s", exc)
        time.sleep(_PAUSE_S)
        try:
            start_agent()
        except BaseException as exc:  # of a start; one that lives may be finishing the save, and decide
            raise AgentSilent("this node's agent", "finish", outline.manifest.save_id, _tell(exc)) from exc
    raise AssertionError("the last try returns or raises")


def _finish(store: LocalStore, save_id: str, body: bytes) -> Finished:
    endpoint = read_endpoint(store.agent_directory())
    if endpoint is None:
        raise StoreUnavailable("this node's agent", "finish", save_id, "it is not there", LOG_HINT)
    path = f"/v1/saves/{save_id}/finish"
    with AgentClient(endpoint.local_address()) as client:
        try:
            client.put("POST", path, body)
            failpoints.reach("coordinator.handed-over")
            return Finished.from_json(client.call("POST", path))
        except ReplicatedCkptError:
            raise  # the agent has given the save up, or is gone
        except BaseException as exc:  # from here on this rank cannot tell, and must not have the other nodes give it up
            raise AgentSilent("this node's agent", "finish", save_id, _tell(exc)) from exc


def _tell(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"
