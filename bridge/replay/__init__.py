"""Looking back: what a trajectory holds, and whether the adapters it names did sample it. The ledger is only read."""
