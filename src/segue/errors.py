"""The error tree. Each message says what was expected, what came and how to fix it.

    SegueError
    ├── InputError       a file, column, row, id or table the user gave cannot be used
    ├── SettingsError    a recipe, a key or a value in the settings cannot be used
    ├── FolderError      a data or run folder is missing, exists already, is damaged or of another format
    ├── TrainingError    training cannot continue (the loss is not finite, there is no training data)
    └── StoreError       the store of histories cannot be reached, read or written

The command line prints the message of a SegueError and exits with code 1; any other exception is a bug.
"""

from __future__ import annotations


class SegueError(Exception):
    """A refusal, with a message that the user can act on."""


class InputError(SegueError):
    """A file, column, row, id or table the user gave cannot be used."""


class SettingsError(SegueError):
    """A recipe, a key or a value in the settings cannot be used."""


class FolderError(SegueError):
    """A data or run folder is missing, exists already, is damaged or of another format."""


class TrainingError(SegueError):
    """Training cannot continue."""


class StoreError(SegueError):
    """The store of histories cannot be reached, read or written."""
