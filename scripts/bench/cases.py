"""What is compared: shapes of networks, and cases, each a row of the table with an arm for each who takes it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = True

    @property
    def config(self) -> dict[str, object]:
        """As transformers' `LlamaConfig` takes it."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 4096,
        }


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 512),
    "1M": Shape(128, 352, 4, 4, 4, 2048),
    "15M": Shape(288, 768, 6, 6, 6, 32000),
    # Two of the 32 layers of Llama-3-8B, with its whole vocabulary.
    "8B-slice": Shape(4096, 14336, 2, 32, 8, 128256, tied=False),
}

LIMIT, LIMIT_OURS, OURS = "bare", "bare+", "ours"
"""The hand-written loop, the same around our forward pass, and this toolkit: arms that need no extra."""


AS_TEXTS, DPO = "ours-texts", "dpo"
"""This toolkit on the rows of pairs, both of whose answers are learned as texts: other losses, which are not compared;
and the kind of such cases."""


@dataclass(frozen=True)
class Case:
    """One row: the same weights, data, precision and hyper-parameters for all its arms."""

    name: str
    shape: str
    arms: tuple[str, ...]
    """Names of arms, some with a launch behind an `@`, such as `ours@fsdp`; the first one's losses are the right
    ones."""
    kind: str = "full"
    """`full`, `lora`, `qlora` or `dpo`, whose rows are pairs."""
    precision: str = "fp32"
    length: int = 256
    """Tokens a row."""
    micro: int = 4
    """Rows of a micro-batch of one process; with two processes each has half of them."""
    accumulation: int = 1
    warm: int = 8
    """Steps of the first turn: compared, not timed."""
    turn: int = 3
    """Steps of each turn that is timed."""
    threads: int = 1
    """Over all processes of an arm."""
    gib: float = 0.0
    """Memory that one arm takes at most, where that is much: fewer arms then live at the same time."""

    @property
    def rows(self) -> int:
        """Rows of an optimiser step, over all processes."""
        return self.micro * self.accumulation

    @property
    def targets_of_row(self) -> int:
        """What a row's loss is divided by."""
        return 1 if self.kind == DPO else self.length - 1

    @property
    def tolerance(self) -> float:
        """Largest relative difference of a step's loss."""
        return 1e-4 if self.precision == "fp32" else 5e-3

    def steps(self, rounds: int) -> int:
        """Steps that an arm takes at most: the first turn, the rounds, and a turn that is counted."""
        return self.warm + rounds * self.turn + COUNTED


EACH = "-each"
"""What follows a launch that sums gradients over its processes after each micro-batch, not once a step."""

COUNTED = 4
"""Steps of the turn in which host synchronisations and collectives are counted; it is not timed."""

SINGLE = (LIMIT, LIMIT_OURS, OURS, "trainer", "trl", "trl-best", "litgpt")
FEW = (LIMIT, LIMIT_OURS, OURS, "trainer", "trl-best")


PROCESSES = {"": 1, "single": 1, "fsdp_tp": 4}
"""Of a launch; two of any other one."""

GROUPS = {"sp": 1, "tp": 1}
"""Groups of processes that read rows of their own; two of any other launch on several processes."""


def launch_of(arm: str) -> tuple[str, str, int]:
    """An arm's name, launch and processes."""
    name, _, launch = arm.partition("@")
    return name, launch or "single", PROCESSES.get(launch, 2)


def cases() -> list[Case]:
    """All cases that are compared turn by turn."""
    small = Case("1M fp32", "1M", SINGLE, length=256, micro=8, warm=50, turn=10)
    medium = Case("15M fp32", "15M", FEW, warm=8, turn=3)
    wide = Case("8B-slice LoRA bf16", "8B-slice", (LIMIT, OURS, "trainer"), kind="lora", precision="bf16", length=128)
    wide = replace(wide, micro=1, warm=2, turn=1, gib=3.5)
    launches = ("ddp", "fsdp", "zero2", "zero3")
    pairs = {launch: tuple(f"{arm}@{launch}" for arm in (LIMIT, LIMIT_OURS, OURS)) for launch in launches}
    pairs["ddp"] += (OURS + "@single",)
    two = replace(medium, micro=4, warm=6, turn=3, threads=2)
    return [
        small,
        replace(small, name="1M bf16", precision="bf16"),
        medium,
        replace(medium, name="15M bf16", precision="bf16"),
        replace(small, name="1M fp32, accumulation 8", accumulation=8, micro=2, warm=20, turn=5, arms=FEW),
        replace(small, name="1M LoRA fp32", kind="lora", warm=30, turn=5, arms=(LIMIT, OURS, "trainer", "trl-best")),
        wide,
        replace(wide, name="8B-slice QLoRA bf16", kind="qlora"),
        *(replace(two, name=f"15M fp32, 2 x {launch}", arms=arms) for launch, arms in pairs.items()),
        replace(
            two,
            name="15M fp32, 2 x fsdp, accumulation 4",
            arms=tuple(f"{arm}@fsdp{way}" for way in ("", EACH) for arm in (LIMIT, OURS)),
            micro=2,
            accumulation=4,
        ),
        *(
            replace(
                medium,
                name=f"15M DPO {precision}",
                arms=(LIMIT, OURS, AS_TEXTS, "trl", "trl-best"),
                kind=DPO,
                precision=precision,
                length=320,
            )
            for precision in ("fp32", "bf16")
        ),
        # Rows or layers that are split, beside what is replicated or sharded: the same rows, on two cores.
        replace(
            two,
            name="15M fp32, split",
            arms=(f"{LIMIT}@ddp", *(f"{OURS}@{launch}" for launch in ("ddp", "fsdp", "sp", "tp", "fsdp_tp"))),
        ),
    ]


def quick() -> list[Case]:
    """The thin slice that ends in three minutes."""
    return [replace(cases()[0], arms=(LIMIT, LIMIT_OURS, OURS, "trainer"))]


def tiny() -> list[Case]:
    """What the tests run."""
    case = Case("tiny", "tiny", (LIMIT, OURS, "trainer"), length=32, micro=2, warm=4, turn=2)
    return [
        case,
        replace(case, name="tiny, accumulation 2", accumulation=2),
        replace(case, name="tiny bf16, all", arms=SINGLE, precision="bf16"),
        replace(case, name="tiny fp32, all", arms=SINGLE),
        replace(case, name="tiny LoRA", arms=(LIMIT, OURS, "trainer", "trl-best"), kind="lora"),
        replace(case, name="tiny DPO", arms=(LIMIT, OURS, AS_TEXTS, "trl-best"), kind=DPO, length=320),
        replace(case, name="tiny QLoRA", arms=(LIMIT, OURS, "trainer"), kind="qlora", precision="bf16"),
        *(
            replace(
                case, name=f"tiny {launch}", arms=tuple(f"{a}@{launch}" for a in (LIMIT, LIMIT_OURS, OURS)), threads=2
            )
            for launch in ("ddp", "fsdp", "zero2", "zero3")
        ),
    ]
