"""Heads of transformers' networks: the outputs, and the class of transformers that opens such a network."""

from dataclasses import dataclass
from typing import Any

import transformers


@dataclass(frozen=True)
class Head:
    """The part of a network that turns hidden states into what a task learns."""

    auto_class: str
    """The class of transformers that opens such networks, by name."""
    peft_type: str
    """The type of task in an adapter's configuration."""
    pipeline_tag: str
    """The hub's word for what such networks are used for."""
    next_token: bool = False
    """True if it scores the token behind each one, and can compute its loss in chunks."""
    encodes: bool = False
    """True if its networks read one text, by an encoder, and write another one."""
    bare: bool = False
    """True if there is none: networks put out the hidden states of tokens."""

    @property
    def may_be_new(self) -> bool:
        """True if pretrained files may lack it, as none do that write text; such a head is trained whole."""
        return not (self.next_token or self.encodes)

    def modules_beside_body(self, network: Any) -> list[str]:
        """Returns the names of the modules beside the pretrained body, if files may lack them; else none."""
        body = network.base_model
        if not self.may_be_new or body is network:
            return []
        children = [(name, child) for name, child in network.named_children() if child is not body]
        return [name for name, child in children if any(True for _ in child.parameters())]

    def unused_modules(self, network: Any) -> list[str]:
        """Returns the names of the modules that nothing is learned of: poolers, where hidden states are read."""
        names = [name for name, _ in network.named_modules()] if self.bare else []
        return [name for name in names if name.rpartition(".")[2] == "pooler"]

    @property
    def auto(self) -> Any:
        return getattr(transformers, self.auto_class)


NEXT_TOKEN = Head("AutoModelForCausalLM", "CAUSAL_LM", "text-generation", next_token=True)
