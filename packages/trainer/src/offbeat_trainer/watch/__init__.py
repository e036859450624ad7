"""What a run is watched by: deadlines, timeline, reporters."""
