"""Speculative decoding with compiled verification: drafts, key-value cache, loops."""

from torchvm.engine.decoders import Generation, PlainDecoder, SpeculativeDecoder
from torchvm.engine.drafts import Draft, Drafter
from torchvm.engine.prompt_lookup import PromptLookupDrafter
from torchvm.engine.speculative import generate

__all__ = [
    "Draft",
    "Drafter",
    "Generation",
    "PlainDecoder",
    "PromptLookupDrafter",
    "SpeculativeDecoder",
    "generate",
]
