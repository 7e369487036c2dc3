"""torchvm: verify masks for speculative decoding, laid out by what the compiled graph reads."""

__version__ = "0.1.0"
