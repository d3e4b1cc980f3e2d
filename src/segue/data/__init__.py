"""Logs in, batches out: log → events → vocabulary → split → sequences → batches. Never imports torch."""

from segue.data.batch import Batch
from segue.data.dataset import Data, UserIds
from segue.data.local import prepare, prepare_folder
from segue.data.sequences import Sequences
from segue.data.settings import PrepareSettings
from segue.data.split import Cases, Split
from segue.data.summary import summary_lines
from segue.data.vocabulary import Vocabulary

__all__ = [
    "Batch",
    "Cases",
    "Data",
    "PrepareSettings",
    "Sequences",
    "Split",
    "UserIds",
    "Vocabulary",
    "prepare",
    "prepare_folder",
    "summary_lines",
]
