"""What a person sees of a run: logs, the timeline, metrics, the live table, plots and the summary."""
