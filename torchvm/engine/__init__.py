"""Speculative decoding with compiled verification: drafts, key-value cache, loops."""

from torchvm.engine.decoders import Generation, PlainDecoder, SpeculativeDecoder
from torchvm.engine.draft_models import ModelDrafter
from torchvm.engine.drafts import Draft, Drafter
from torchvm.engine.early_exit import EarlyExitDrafter
from torchvm.engine.prompt_lookup import PromptLookupDrafter
from torchvm.engine.speculative import generate

__all__ = [
    "Draft",
    "Drafter",
    "EarlyExitDrafter",
    "Generation",
    "ModelDrafter",
    "PlainDecoder",
    "PromptLookupDrafter",
    "SpeculativeDecoder",
    "generate",
]
