"""NVFP4 checkpoints in safetensors: read, inspected, converted and written, in three conventions."""

from blockscale.checkpoints.checkpoint import Checkpoint, load_checkpoint
from blockscale.checkpoints.errors import CheckpointError
from blockscale.checkpoints.model import EXCLUDED, LayerReport, quantize_checkpoint
from blockscale.checkpoints.save import CONVENTIONS, save_checkpoint

__all__ = [
    "CONVENTIONS",
    "EXCLUDED",
    "Checkpoint",
    "CheckpointError",
    "LayerReport",
    "load_checkpoint",
    "quantize_checkpoint",
    "save_checkpoint",
]
