"""Starting and joining Dask clusters, TLS, and checks of a machine or a cluster."""
