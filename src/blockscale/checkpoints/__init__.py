"""NVFP4 checkpoints in safetensors: read, inspected, converted and written, in three conventions."""

from blockscale.checkpoints.checkpoint import Checkpoint, load_checkpoint
from blockscale.checkpoints.errors import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "load_checkpoint"]
