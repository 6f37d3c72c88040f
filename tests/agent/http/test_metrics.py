"""Metrics: what a scraper is given."""

import http.client
from pathlib import Path

from tests.agent.agents import running_agent


def test_a_scraper_is_told_that_they_are_text(tmp_path: Path) -> None:
    """Prometheus 3 fails a scrape whose answer says that it is of a type that it does not know."""
    with running_agent(tmp_path / "a") as agent:
        connection = http.client.HTTPConnection("127.0.0.1", agent.endpoint.port, timeout=30)
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {agent.endpoint.owner_token}"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.headers.get_content_type() == "text/plain"
        assert response.headers.get_param("version") == "0.0.4"
        assert b"# TYPE replicated_ckpt_" in response.read()
        connection.close()
