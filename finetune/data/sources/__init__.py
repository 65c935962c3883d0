"""Files and datasets, read as documents."""
