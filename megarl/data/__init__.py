"""Data: prompts and demonstrations from jsonl files, packing, the built-in arithmetic task."""
