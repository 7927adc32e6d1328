"""The only files that touch a device: `cuda` for silicon, `emulated` for the software GPU. Both run one artefact."""
