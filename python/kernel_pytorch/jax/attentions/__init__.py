"""What surrounds attention: masks by blocks, packed heads, parts of a sequence on several devices."""
