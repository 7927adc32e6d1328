"""The main job: a real sentence encoder whose linear layers run in NVFP4."""
