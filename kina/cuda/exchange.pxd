# A DLPack producer has its data on this device, or the right typed error.
cdef int check_producer_device(object source, int ordinal) except -1
