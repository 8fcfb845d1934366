# The DeviceInfo of a device that is known to exist, read once.
cdef object known_device(int ordinal)
