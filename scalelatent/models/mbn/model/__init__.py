"""The mathematics of bootstrap networks: random draws, layers of clusterings, principal components."""
