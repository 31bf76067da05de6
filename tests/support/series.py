"""What `/metrics` says, as values that can be compared."""

from collections.abc import Iterable

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(series: Iterable[Sample], name: str, **labels: str) -> float:
    """Return the value of one series; 0 when it is not there, as for Prometheus's `increase`."""
    found = [sample.value for sample in series if sample.name == name and sample.labels == labels]
    assert len(found) <= 1, (name, labels)
    return found[0] if found else 0.0


def scrape(client: httpx2.Client) -> list[Sample]:
    response = client.get("/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return samples(response.text)
