"""Tools around the kernels: timing (profiling) and checks of layers against torch (validation_framework)."""
