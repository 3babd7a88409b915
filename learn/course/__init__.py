"""The program behind `kpt learn`: builds a step, runs it, and shows predicted next to measured times."""
