"""Encoders, one per file, each with its settings. `ModelSettings` is the choice among them; a new one is added here."""

from __future__ import annotations

from segue.models.encoders.bert4rec import BERT4RecSettings
from segue.models.encoders.caser import CaserSettings
from segue.models.encoders.esasrec import ESASRecSettings
from segue.models.encoders.gru4rec import GRU4RecSettings
from segue.models.encoders.hstu import HSTUSettings, SASRecMetaSettings
from segue.models.encoders.narm import NARMSettings
from segue.models.encoders.nextitnet import NextItNetSettings
from segue.models.encoders.pinnerformer import PinnerFormerSettings
from segue.models.encoders.sasrec import SASRecSettings
from segue.models.encoders.seq2seq import Seq2SeqSettings
from segue.models.encoders.transformer import TransformerSettings

ModelSettings = (
    SASRecSettings
    | ESASRecSettings
    | BERT4RecSettings
    | HSTUSettings
    | SASRecMetaSettings
    | TransformerSettings
    | GRU4RecSettings
    | NARMSettings
    | CaserSettings
    | NextItNetSettings
    | Seq2SeqSettings
    | PinnerFormerSettings
)
