"""Tools around the kernels: timing (profiling, performance, compiler_optimization_assistant), checks of layers
against torch (validation_framework), formats of states (state_formats)."""
