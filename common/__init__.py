"""What every model shares and no reader wants to read seven times."""
