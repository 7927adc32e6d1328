"""NVFP4 checkpoints in safetensors: read, inspected, converted and written, in three conventions."""

from blockscale.checkpoints.checkpoint import Checkpoint, load_checkpoint
from blockscale.checkpoints.errors import CheckpointError
from blockscale.checkpoints.save import CONVENTIONS, save_checkpoint

__all__ = ["CONVENTIONS", "Checkpoint", "CheckpointError", "load_checkpoint", "save_checkpoint"]
