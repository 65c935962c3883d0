"""finetune: one training loop for Hugging Face models on every backend of `accelerate`.

The recipe says what is learned; the launch config says where it runs.
"""

__version__ = "0.1.0"
