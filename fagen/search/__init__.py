"""Find the fastest schedule for given shapes and a card: a declared space in, schedules out."""
