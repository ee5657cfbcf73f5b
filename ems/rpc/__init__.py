"""The wire: the control plane over gRPC (`channel`, stubs in `_pb`), and the frames of the write channel.

`_pb` is generated from `protos/` by `.ci/generate` and committed; `.ci/generate --check` finds a difference.
"""
