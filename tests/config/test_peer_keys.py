"""The table of other tools' keys names what is there, and errors of unknown keys say what it says."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from finetune.cli.convert_config import RULES
from finetune.config.peer_keys import CONVERTED, LAUNCH, PeerKey, called_here, count_keys, find_peer_key, peer_table
from finetune.config.recipe import RECIPE_FIELDS, validate_recipe
from finetune.distributed.launch.launch_schema import KEYS
from finetune.utils.errors import RecipeError
from finetune.utils.shipped_files import LAUNCH_FILES, shipped_names

TABLE = peer_table()
SMALL: dict[str, Any] = {"model": {"name": "x"}, "data": {"train": [{"sample": 2}]}, "length": {"steps": 1}}


@pytest.mark.parametrize("row", TABLE["keys"], ids=lambda row: row.keys[0])
def test_rows_name_what_is_there(row: PeerKey) -> None:
    assert set(row.of) <= TABLE["tools"].keys()
    assert bool(row.here) != bool(row.why)
    assert row.rule in ("", "same", *RULES)
    if row.here.startswith(LAUNCH):
        assert row.here.removeprefix(LAUNCH) in KEYS
    elif row.here:
        assert row.here in RECIPE_FIELDS
    for ours in (row.values or {}).values():
        for key, value in ours.items() if isinstance(ours, dict) else [(row.here, ours)] * (ours is not None):
            if key == "launch":
                assert value in shipped_names(LAUNCH_FILES)
            elif key != "lora":
                TypeAdapter(RECIPE_FIELDS[key].annotation).validate_python(value)


def test_a_tool_has_a_key_once() -> None:
    owned = [(tool, key) for row in TABLE["keys"] for tool in row.of for key in row.keys]
    assert len(owned) == len(set(owned)) > 700


def test_what_holds_for_tools_is_in_table_and_schema() -> None:
    assert {*TABLE["defaults"]} == {*TABLE["fixed"]} == {*CONVERTED}
    assert {key for fixed in TABLE["fixed"].values() for key in fixed} <= RECIPE_FIELDS.keys()
    for tool, defaults in [
        *TABLE["defaults"].items(),
        *TABLE["preference_defaults"].items(),
        *TABLE["reward_defaults"].items(),
    ]:
        assert all(find_peer_key(tool, key) for key in defaults)


def refusal(section: str, key: str) -> str:
    tree = {**SMALL, section: {**SMALL.get(section, {}), key: 1}} if section else {**SMALL, key: 1}
    with pytest.raises(RecipeError) as refused:
        validate_recipe(tree)
    return str(refused.value)


@pytest.mark.parametrize(
    ("section", "key", "said"),
    [
        (
            "batch",
            "micro_batch_size",
            "Axolotl's and LitGPT's micro_batch_size is called batch.micro_size here (rows per",
        ),
        ("", "learning_rate", "transformers' and Axolotl's learning_rate is called optim.lr here"),
        ("lora", "target_modules", "is called lora.targets here"),
        ("data", "cutoff_len", "LLaMA-Factory's cutoff_len is called data.sequence_length here"),
        ("", "load_in_4bit", "is called model.quantization here (true: nf4)"),
        ("", "gradient_accumulation_steps", "is called batch.global_size here (rows a step = its product with"),
        ("", "deepspeed", "is called deepspeed_config.deepspeed_config_file of the launch file"),
        ("", "wandb_project", "Axolotl's wandb_project is called log.trackers here (`[wandb]`"),
        ("", "dpo_beta", "Axolotl's dpo_beta is called preference.beta here"),
    ],
)
def test_keys_of_other_tools_are_answered(section: str, key: str, said: str) -> None:
    full = f"{section}.{key}".lstrip(".")
    found = refusal(section, key)
    assert f"{full}: unknown key; " in found
    assert said in found
    assert "did you mean" not in found


def test_a_key_of_two_meanings_gets_both() -> None:
    said = called_here("batch_size")
    assert said is not None
    assert "torchtune's batch_size is called batch.micro_size" in said
    assert "Axolotl's batch_size is called batch.global_size" in said


def test_a_key_that_no_tool_has_gets_the_nearest() -> None:
    assert called_here("sequence_lenght") is None
    assert "did you mean 'sequence_length'?" in refusal("data", "sequence_lenght")


def test_a_tools_own_row_comes_before_transformers() -> None:
    own, inherited = find_peer_key("torchtune", "dtype"), find_peer_key("trl", "dtype")
    assert own is not None
    assert own.here == "precision"
    assert inherited is not None
    assert not inherited.here


def test_a_config_is_known_by_most_of_its_keys() -> None:
    hits = count_keys({"base_model": "x", "sequence_len": 3, "learning_rate": 1, "model": {"_component_": "y"}})
    assert max(hits, key=lambda tool: len(hits[tool])) == "axolotl"
    assert hits["torchtune"] == ["model._component_"]
