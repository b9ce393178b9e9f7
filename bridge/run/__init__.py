"""One run on one machine: its processes, its panel, its summary and its pictures."""
