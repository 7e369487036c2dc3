"""Tests of torchvm, one file a module."""
