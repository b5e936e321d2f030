"""Where the experts lie and how they are reached."""
