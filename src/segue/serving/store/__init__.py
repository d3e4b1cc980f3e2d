"""Stores of events: SQLite and PostgreSQL."""
