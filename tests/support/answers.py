"""What somebody does with an export who has transformers and peft, and has never heard of this toolkit.

Run as a file in a process of its own: `python -P answers.py ask.json answer.json`.
"""

import json
import sys
from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def answers(folder: str, base: str | None, questions: list[list[dict[str, str]]]) -> list[dict[str, str]]:
    """Each answer, taken greedily up to where generation stops, and the token that it stops at."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(base or folder)
    if base is not None:
        network = PeftModel.from_pretrained(network, folder)
        network.generation_config = GenerationConfig.from_pretrained(folder)
    found = []
    for messages in questions:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = network.generate(**inputs, max_new_tokens=120, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        found.append({"text": tokenizer.decode(ids[:-1]), "end": tokenizer.decode(ids[-1:])})
    return found


if __name__ == "__main__":
    ask = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    told = {name: answers(place["folder"], place["base"], ask["questions"]) for name, place in ask["places"].items()}
    assert not any(name.split(".")[0] == "finetune" for name in sys.modules)
    Path(sys.argv[2]).write_text(json.dumps(told), encoding="utf-8")
