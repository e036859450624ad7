"""The only place that imports Ray: processes, where they are put, and every wait for them."""
