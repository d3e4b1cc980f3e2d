"""A real PostgreSQL for the tests of the service: one server a worker, started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.postgres import PostgresServer


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    server = PostgresServer(durable=False)
    yield server
    server.close()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """An empty database."""
    return postgres_server.new_database()
