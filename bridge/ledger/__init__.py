"""The memory of a run: streams to Parquet files and a chain of commits, and back."""
