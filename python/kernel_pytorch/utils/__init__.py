"""Tools around the kernels: timing (profiling, performance, compiler_optimization_assistant) and checks of layers
against torch (validation_framework)."""
