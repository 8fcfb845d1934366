from libc.stdint cimport uint64_t

# The calling thread's number: never 0, never reused, also valid in threads Python never saw.
cdef uint64_t thread_token() noexcept nogil
# A process-unique number, never 0, never reused: Runtimes, domains, streams.
cdef uint64_t issue_number() noexcept nogil
