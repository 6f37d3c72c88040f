"""Scrapes an agent as Prometheus does: with the peer token, over HTTP."""

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message

from prometheus_client.parser import text_string_to_metric_families

from replicated_ckpt.agent.state.endpoint import Endpoint
from tests.agent.agents import ANSWER_S, RunningAgent


@dataclass(frozen=True)
class Scraped:
    """The answer to a scrape."""

    text: str
    headers: Message


def scrape(agent: RunningAgent | Endpoint, path: str = "/metrics") -> Scraped:
    endpoint = agent.endpoint if isinstance(agent, RunningAgent) else agent
    request = urllib.request.Request(
        f"http://127.0.0.1:{endpoint.port}{path}", headers={"Authorization": f"Bearer {endpoint.token}"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return Scraped(answer.read().decode(), answer.headers)


def scraped(agent: RunningAgent | Endpoint, path: str = "/metrics") -> Mapping[str, float]:
    """The samples by name, without the common prefix, with sorted labels: `errors_total{class=...,origin=...}`."""
    found = {}
    for family in text_string_to_metric_families(scrape(agent, path).text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix("replicated_ckpt_") + (f"{{{labels}}}" if labels else "")] = sample.value
    return found
