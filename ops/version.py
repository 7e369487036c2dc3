"""The version of torchvm: read by the build, the package and the compile-cache key."""

__all__ = ["__version__"]

__version__ = "0.1.0"
