"""From sources to batches: `prepare` reads, tokenises and packs; `Rows` are read at what `rows_at` says."""

from finetune.data.order import rows_at
from finetune.data.prepare import PreparedData, prepare
from finetune.data.report import DataReport
from finetune.data.rows import IGNORED, Rows
from finetune.data.tokenizer import load as load_tokenizer

__all__ = ["IGNORED", "DataReport", "PreparedData", "Rows", "load_tokenizer", "prepare", "rows_at"]
