"""The NVFP4 number formats, their packing, and the layouts of block scales."""
