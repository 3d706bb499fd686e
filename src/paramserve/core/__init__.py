"""Pure deciding: no socket, file, thread, sleep or clock. Time and randomness are arguments."""
