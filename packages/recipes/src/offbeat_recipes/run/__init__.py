"""From a plan that holds to a run: folder, processes, loop, report."""
