"""Other people's architectures, small and with random weights: does `optimize` hold on each of them?"""
