"""NVFP4 matrix multiplication."""

from blockscale._version import __version__

__all__ = ["__version__"]
