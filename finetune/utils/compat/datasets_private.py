"""Private names of datasets."""

from datasets import Dataset

from finetune.utils.compat.library_versions import require

require("datasets", Dataset, "_fingerprint")


def fingerprint(dataset: Dataset) -> str:
    """Returns a hash that changes when the rows of the data set do."""
    return str(dataset._fingerprint)
