"""How often an agent calls back the nodes that greetings name."""

import threading
import time

import pytest

from replicated_ckpt.agent.http import greeting
from replicated_ckpt.agent.http.greeting import IN_A_ROW_MAX, INTERVAL_S, PARALLEL_MAX, PER_SENDER_MAX, CallBacks
from replicated_ckpt.errors import StoreUnavailable


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def count_followed_up(turns: CallBacks, tries: int, node: str = "node", sender: str = "10.0.0.1") -> int:
    """How many of `tries` greetings in the name of `node` are followed up."""
    taken = 0
    for _ in range(tries):
        try:
            with turns.take_turn(node, sender):
                taken += 1
        except StoreUnavailable:
            pass
    return taken


def test_a_flood_is_followed_up_now_and_then() -> None:
    """Greetings for one node from one address: a burst is followed up, then one in each interval. Other nodes and
    addresses have their own limit.
    """
    clock = Clock()
    turns = CallBacks(clock)
    assert count_followed_up(turns, 1000) == IN_A_ROW_MAX
    assert (
        count_followed_up(turns, 1000, sender="10.0.0.2")
        == count_followed_up(turns, 1000, node="other")
        == IN_A_ROW_MAX
    )
    for _ in range(5):
        clock.now += INTERVAL_S
        assert count_followed_up(turns, 1000) == 1
    clock.now += IN_A_ROW_MAX * INTERVAL_S
    assert count_followed_up(turns, 1000) == IN_A_ROW_MAX


def test_the_number_of_limits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender with many addresses cannot use unlimited memory, and its entries expire."""
    monkeypatch.setattr(greeting, "PAIRS_MAX", 10)
    clock = Clock()
    turns = CallBacks(clock)
    assert sum(count_followed_up(turns, 1, sender=f"10.0.0.{host}") for host in range(30)) == 10
    clock.now += INTERVAL_S
    assert count_followed_up(turns, 1, sender="10.0.1.1") == 1


def greet_at_once(turns: CallBacks, senders: list[str]) -> tuple[int, int]:
    """Returns how many greetings were followed up, and the largest number at the same time."""
    begun, lock = threading.Barrier(len(senders)), threading.Lock()
    taken, under_way, most = 0, 0, 0

    def greet(node: str, sender: str) -> None:
        nonlocal taken, under_way, most
        begun.wait()
        with turns.take_turn(node, sender):
            with lock:
                taken, under_way = taken + 1, under_way + 1
                most = max(most, under_way)
            time.sleep(0.002)  # about as long as a call back over a network
            with lock:
                under_way -= 1

    threads = [threading.Thread(target=greet, args=(f"node-{at}", sender)) for at, sender in enumerate(senders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken, most


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("hosts", "at_once_max"), [(1000, PARALLEL_MAX), (1, PER_SENDER_MAX)])
def test_a_cluster_may_start_at_once(hosts: int, at_once_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 nodes greet at the same time, each from its own address or all from one: every greeting is followed up."""
    monkeypatch.setattr(greeting, "WAIT_MAX_S", 60.0)  # a thousand threads on a busy machine
    taken, most = greet_at_once(CallBacks(), [f"10.0.0.{at % hosts}" for at in range(1000)])
    assert taken == 1000
    assert 1 < most <= at_once_max


def test_a_sender_whose_call_backs_hang_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call backs of a sender hang and use up the limit of that sender: its next greeting is refused after a while."""
    monkeypatch.setattr(greeting, "WAIT_MAX_S", 0.1)
    turns, let_go = CallBacks(), threading.Event()

    def hang(node: str) -> None:
        with turns.take_turn(node, "10.0.0.1"):
            let_go.wait()

    threads = [threading.Thread(target=hang, args=(f"node-{at}",)) for at in range(PER_SENDER_MAX)]
    for thread in threads:
        thread.start()
    try:
        with pytest.raises(StoreUnavailable, match=f"{PER_SENDER_MAX} greetings"), turns.take_turn("more", "10.0.0.1"):
            pass
        assert count_followed_up(turns, 1, sender="10.0.0.2") == 1
    finally:
        let_go.set()
        for thread in threads:
            thread.join()
    assert count_followed_up(turns, 1) == 1
