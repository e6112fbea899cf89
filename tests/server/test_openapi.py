"""Requests made up from the OpenAPI document, right and wrong ones: no answer is a fault of the server's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.schemas import BaseSchema

from tests.server.serving import Server, running_server

OPERATIONS = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/live"),
    ("GET", "/version"),
    ("GET", "/metrics"),
}


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Answers are short, whatever a made-up request asks for."""
    with running_server(max_completion_tokens=4) as running:
        yield running


@pytest.fixture(scope="module")
def document(small: Server) -> BaseSchema:
    return schemathesis.openapi.from_dict(small.client.get("/openapi.json").json())


def test_the_document_tells_of_every_operation(document: BaseSchema) -> None:
    found = {(op.ok().method.upper(), op.ok().path) for op in document.get_all_operations()}
    assert found == OPERATIONS


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *((*operation, GenerationMode.POSITIVE) for operation in sorted(OPERATIONS)),
        *((*operation, GenerationMode.NEGATIVE) for operation in sorted(OPERATIONS) if operation[0] == "POST"),
    ],
)
def test_no_request_brings_out_a_fault(
    document: BaseSchema, small: Server, method: str, path: str, mode: GenerationMode
) -> None:
    operation = document[path][method]

    @given(data=st.data())
    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    def ask(data: st.DataObject) -> None:
        response = data.draw(operation.as_strategy(generation_mode=mode)).call(base_url=small.url)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    ask()
