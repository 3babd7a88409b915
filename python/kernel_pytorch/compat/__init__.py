"""Other libraries' functions by their names and signatures, on this library's kernels. Nothing is patched on import."""
