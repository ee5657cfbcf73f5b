# One text makes both modules, `_device.pxi`: what is true of one is true of the other.
from ems_native._acl import HOST as HOST
from ems_native._acl import UNKNOWN as UNKNOWN
from ems_native._acl import Runtime as Runtime
from ems_native._acl import first_unreadable as first_unreadable
from ems_native._acl import set_fault_types as set_fault_types
