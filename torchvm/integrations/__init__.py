"""Bridges from torchvm's ops to other libraries; each module needs the library it names."""
