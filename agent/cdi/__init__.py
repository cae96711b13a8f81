"""What this host publishes: specs, profiles, the state that is wanted, and the files on disk."""
