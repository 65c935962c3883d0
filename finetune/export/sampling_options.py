"""Options of generation, checked before torch is imported."""

from dataclasses import dataclass

from finetune.utils.errors import RecipeError


@dataclass(frozen=True)
class SamplingOptions:
    """Choice of the next token. Temperature 0 takes the likeliest."""

    max_new_tokens: int = 200
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in {"max_new_tokens": self.max_new_tokens, "top_k": self.top_k}.items():
            if value is not None and value < 1:
                raise RecipeError(f"{name} is {value}; give 1 or more.")
        if not 0 <= self.temperature < float("inf"):
            raise RecipeError(f"temperature is {self.temperature}; give 0 (always the likeliest token) or more.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise RecipeError(f"top_p is {self.top_p}; give more than 0, and 1 at the most.")
