"""Redis or Valkey between the processes of a run: doorbell (announce), queue (trajectories), news (events)."""
