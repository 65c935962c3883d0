"""Documents of one text or a pair of texts, a row each, of which a number is learned."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from finetune.config.recipe import NUMBER_FIGURES
from finetune.data.data_report import TargetReport
from finetune.data.rows.kinds import classes
from finetune.data.rows.kinds.row_kind import TokenRows
from finetune.data.sources.readers import Fields, read_text
from finetune.utils.errors import DataError

_LARGEST_FP32 = 3.4028234e38


def _number(label: Any, fields: Fields, where: str) -> float:
    try:
        number = math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST_FP32:
        raise DataError(
            f"{where}: the label in '{fields.label}' is {json.dumps(label, default=str)[:80]}, and regression needs a "
            "finite number that fp32 can hold. Mend or remove the record, or name another `label_field`."
        )
    return number


def _report(rows: TokenRows, names: Sequence[str]) -> dict[str, Any]:
    numbers = rows.values.astype(np.float64)
    figures = (numbers.min(), numbers.mean(), numbers.max(), numbers.std())
    return {"numbers": TargetReport(*map(float, figures))}


KIND = replace(
    classes.KIND,
    labels="number",
    metrics=(),
    figures=NUMBER_FIGURES,
    read=partial(read_text, label_of=_number),
    key=("numbers",),
    values=lambda columns, labels, classes: np.array(labels, np.float32)[columns["labels"]],
    report=_report,
    shown_as="the number, which is learned, is",
)
