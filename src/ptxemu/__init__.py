"""A software GPU that executes PTX: an empty room in this version."""
