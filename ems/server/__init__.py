"""The node server: owns one pool and serves it to the processes of its node."""
