"""Tasks that come with lorabridge: each module is an environment a run's configuration can name."""
