"""Speculative decoding with compiled verification: drafts, key-value cache, loops."""

from torchvm.engine.decoders import Generation, PlainDecoder, SpeculativeDecoder
from torchvm.engine.draft_head import DraftHead
from torchvm.engine.draft_models import ModelDrafter
from torchvm.engine.drafts import Draft, Drafter, HiddenDrafter
from torchvm.engine.eagle import EagleHead
from torchvm.engine.early_exit import EarlyExitDrafter
from torchvm.engine.head_drafter import HeadDrafter
from torchvm.engine.prompt_lookup import PromptLookupDrafter
from torchvm.engine.speculative import generate
from torchvm.engine.steps import states_of

__all__ = [
    "Draft",
    "DraftHead",
    "Drafter",
    "EagleHead",
    "EarlyExitDrafter",
    "Generation",
    "HeadDrafter",
    "HiddenDrafter",
    "ModelDrafter",
    "PlainDecoder",
    "PromptLookupDrafter",
    "SpeculativeDecoder",
    "generate",
    "states_of",
]
