"""The errors that a user can fix. Each message says what was expected, what came and how to fix it.

The command line prints the message of a SegueError and exits with code 1; any other exception is a bug.
"""

from __future__ import annotations


class SegueError(Exception):
    """Base of all errors that a user can fix."""


class InputError(SegueError):
    """A file, column, row, id or table the user gave cannot be used."""


class SettingsError(SegueError):
    """A recipe, a key or a value in the settings cannot be used."""


class FolderError(SegueError):
    """A data or run folder is missing, exists already, is damaged or of another format."""


class TrainingError(SegueError):
    """Training cannot continue: the loss is not finite, or there is no training data."""


class StoreError(SegueError):
    """The store of histories cannot be reached, read or written."""
