"""Tensor memory."""

from ptxemu.machine.signal import Signal

__all__ = ["TensorMemory"]


class TensorMemory(Signal):
    """128 lanes by 512 columns of 32 bits."""
