"""What kernels are made of. `geometry` does without the compiler; everything else is traced by it."""
