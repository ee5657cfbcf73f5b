"""The wire: the control plane (gRPC; `channel`, stubs in `_pb`), the write channel's frames.

`_pb` is generated from `protos/` by `.ci/generate` and committed; `.ci/generate --check` finds a
difference.
"""
