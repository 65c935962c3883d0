"""Private names of datasets."""

from datasets import Dataset

from finetune.utils.compat.library_versions import require

require("datasets", Dataset, "_fingerprint")


def fingerprint(dataset: Dataset) -> str:
    """A hash that changes when the data set's rows do."""
    return str(dataset._fingerprint)
