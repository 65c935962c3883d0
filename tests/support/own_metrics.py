"""Metrics of a user's own; recipes in tests name them as `own_metrics:NAME`."""

Texts = list[str]


def num_words(predictions: Texts, references: list[Texts]) -> float:
    assert len(predictions) == len(references)
    return sum(len(text.split()) for text in predictions) / len(predictions)


def several(predictions: Texts, references: list[Texts]) -> dict[str, float]:
    return {"prompts": len(predictions), "references": sum(map(len, references))}


def fails(predictions: Texts, references: list[Texts]) -> float:
    return 1 / (len(predictions) - len(references))


def fails_later(predictions: Texts, references: list[Texts]) -> float:
    """Only on more than one prompt, so not when it is tried."""
    return 1.0 if len(predictions) == 1 else fails(predictions, references)


def named_wrongly(predictions: Texts, references: list[Texts]) -> dict[str, float]:
    return {"loss": 1.0}


def text(predictions: Texts, references: list[Texts]) -> str:
    return "good"
