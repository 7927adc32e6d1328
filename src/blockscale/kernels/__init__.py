"""The GPU kernels, in CuTe DSL: one file a family of architectures, and the parts that they share."""
