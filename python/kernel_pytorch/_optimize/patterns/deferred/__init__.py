"""Attention that a model writes out in torch's functions, softmax(q k' + ...) v, as one call of ours."""
