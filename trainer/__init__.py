"""The training side: export an adapter, publish it by digest, train on what the stream brings back."""
