from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    TRACE_ALLOCATE
    TRACE_FREE
    TRACE_FAILURE       # the allocation was not served
    TRACE_UNKNOWN_FREE  # of an address that the trace did not see allocated
    TRACE_EMPTY         # of 0 bytes

# One line of a log. Python sees these as records of NumPy: kina/memory/log_reader.py.
ctypedef struct trace_event:
    uint64_t nbytes     # of a free: what its allocation asked for
    int64_t time_us     # since midnight of the first day, or since the epoch
    uint32_t slot       # where the address is kept while it is live: of the allocation and its free the same
    uint32_t line
    uint32_t thread
    uint16_t stream
    uint8_t action
    uint8_t reserved


# Names of threads or streams, as they stand in the file, each with its number.
ctypedef struct name_table:
    char (*names)[48]
    uint32_t *places        # of the hash table; number + 1, or 0
    uint32_t count, capacity, place_count, last


cdef class AllocationTrace:
    cdef trace_event *events        # owned
    cdef size_t count, capacity
    cdef uint32_t slot_count
    cdef bint finished
    cdef name_table threads, streams

    cdef str source
    cdef bytes rest                 # of the last piece: a line that is not complete
    cdef uint64_t line
    cdef bint has_more_columns, cut
    cdef int64_t last_us, day_us
    cdef uint64_t live_bytes, peak_bytes, peak_event, wrong_sizes
    cdef uint32_t *slots            # owned; live: its allocation's event; free: the next free one
    cdef uint32_t slot_capacity, free_slot
    cdef uint64_t *live_addresses   # owned; a hash table
    cdef uint32_t *live_slots       # owned
    cdef size_t live_count, live_capacity
    cdef const char *reason         # of the line that cannot be read

    cdef Py_ssize_t read(self, const char *text, Py_ssize_t length) except? -2 nogil
    cdef int read_line(self, const char *text, const char *end) noexcept nogil
    cdef int read_time(self, const char *text, const char *end, int64_t *out) noexcept nogil
    cdef int settle(self, trace_event *event, uint64_t pointer) noexcept nogil
